"""Triton kernels that push new tokens into a layer of chunks, whose groups share scales."""
