"""Export a model for other runtimes: ONNX, torch.export, OpenVINO."""
