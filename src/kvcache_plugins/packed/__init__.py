"""Base of caches whose layers pack tokens: forks, files, and compilation of kernels in advance."""
