"""The HTTP service (predictions, embeddings, explanations) and the explorer page."""
