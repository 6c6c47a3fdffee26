"""Measures of a classifier: arrays in, numbers out."""
