"""Torch operations on keys and values: the reference in plain PyTorch that every kernel is held against."""
