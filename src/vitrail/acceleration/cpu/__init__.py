"""Faster inference on a CPU: oneDNN with packed weights, and data parallelism over threads."""
