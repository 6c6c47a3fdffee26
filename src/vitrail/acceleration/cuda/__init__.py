"""The encoder as a CUDA device computes it best, to answer: bf16 or fp8, few passes over memory."""
