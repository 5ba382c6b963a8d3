"""Formats of compressed tokens: the data that bytes are read by, parts of a layer, and positions. PyTorch alone."""
