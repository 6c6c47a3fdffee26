"""The command line: one file a command. A command decodes, calls public functions, prints."""
