"""Faster inference and training on a CUDA device: bf16 or fp8, with fused kernels."""
