"""The fused encoder for inference: as few kernels as possible."""
