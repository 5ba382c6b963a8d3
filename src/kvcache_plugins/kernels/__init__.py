"""Arithmetic on bytes, fast: kernels for CPUs in C (`cpu/`), and their callers.

`library` finds the compiled library and runs its kernels; `build` compiles it. Without the library, callers compute in
plain PyTorch.
"""
