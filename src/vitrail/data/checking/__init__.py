"""What is wrong with data, and how fast it can be read."""
