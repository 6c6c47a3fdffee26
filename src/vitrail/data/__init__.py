"""From picture files to batches of tensors: knows no models."""
