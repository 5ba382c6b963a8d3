"""Arithmetic on bytes, fast: kernels for CPUs in C (`cpu/`), and what calls them.

`library` finds the compiled library and checks what is handed to it; `build` compiles it. Where there is no library,
callers compute in plain PyTorch.
"""
