"""A model as a graph that other runtimes can open: ONNX, torch.export, OpenVINO."""
