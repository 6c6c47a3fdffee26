"""fp8 matmuls of the encoder, and their calibration."""
