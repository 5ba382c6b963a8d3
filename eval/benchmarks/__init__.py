"""Benchmarks, a module for each command of `kvcache-plugins bench`."""
