"""Caches whose layers pack tokens: forks, files, and kernels that are compiled in advance."""
