"""Recipe to run."""
