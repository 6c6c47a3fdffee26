"""A bundle and a picture to maps that show what the model looks at."""
