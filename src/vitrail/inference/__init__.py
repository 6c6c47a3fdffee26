"""Using a trained model: what it says of pictures."""
