"""Self-supervised pretraining: methods that train an encoder on images without labels."""
