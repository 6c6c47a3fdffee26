"""From image files to batches of tensors; independent of models."""
