"""A model made ready to answer fast: the same answers within a stated tolerance."""
