"""The fused forward and backward pass for training."""
