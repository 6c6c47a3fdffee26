"""Data checks: problems in a dataset, and how fast it can be read."""
