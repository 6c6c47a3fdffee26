"""How training pictures are varied, drawn from the seed and the position in the stream."""
