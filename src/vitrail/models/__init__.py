"""The Vision Transformer: pure `nn.Module`s that know no files and no data sets."""
