"""The command line: one file per command. A command parses its options, calls a public function and prints."""
