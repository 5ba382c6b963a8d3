"""Triton kernels of `kvcache_plugins`, imported as `kvcache_plugins.triton_kernels`."""

if __name__ == "triton_kernels":
    raise ImportError(
        "The top-level name `triton_kernels` belongs to another project: import `kvcache_plugins.triton_kernels`, and "
        "do not run Python with the repository's root on `sys.path`."
    )
