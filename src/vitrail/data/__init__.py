"""From image files to batches of tensors: knows no models."""
