"""Faster execution of a model: the same outputs within a stated tolerance."""
