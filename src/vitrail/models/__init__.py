"""The Vision Transformer: pure `nn.Module`s, independent of files and datasets."""
