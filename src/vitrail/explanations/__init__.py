"""What a model looks at, and what it has learned: maps of pictures, and the paper's figures."""
