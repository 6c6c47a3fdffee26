"""int8 on the CPU: quantise an exported graph, check it against float32, run it in OpenVINO."""
