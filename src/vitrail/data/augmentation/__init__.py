"""Augmentation of training images, drawn from the seed and the position in the stream."""
