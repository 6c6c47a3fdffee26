"""How training images are varied, drawn from the seed and the position in the stream."""
