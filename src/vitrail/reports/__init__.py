"""A run as one HTML file that anyone can read."""
