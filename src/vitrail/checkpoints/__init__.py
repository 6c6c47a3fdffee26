"""Everything that touches weight files: our bundle, the other libraries' formats, and moving between them."""
