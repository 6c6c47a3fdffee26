"""A bundle and an image to maps that show what the model looks at."""
