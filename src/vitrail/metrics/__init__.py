"""Classification metrics: arrays in, numbers out."""
