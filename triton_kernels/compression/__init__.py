"""Compression of chunks in a few launches: quantization, low rank, selection and storage of outliers."""
