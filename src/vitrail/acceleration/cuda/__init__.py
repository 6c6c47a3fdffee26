"""The encoder optimised for inference on a CUDA device: bf16 or fp8, with fused kernels."""
