"""The command line: one module per command. A command parses its options, calls the library and prints the result."""
