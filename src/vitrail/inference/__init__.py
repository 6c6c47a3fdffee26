"""Using a trained model: predictions, features, probes."""
