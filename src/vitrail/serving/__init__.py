"""Bundles behind HTTP: predictions, features and explanations for other programs, and the explorer page."""
