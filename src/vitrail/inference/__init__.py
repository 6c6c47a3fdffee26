"""A trained model at work: predictions, features, probes."""
