"""Maps of what a model attends to in an image."""
