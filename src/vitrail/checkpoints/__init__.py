"""Weight files: our bundle, other libraries' formats, and conversion between them."""
