"""Pretraining methods without labels: modules that wrap an encoder and compute the loss of a batch."""
