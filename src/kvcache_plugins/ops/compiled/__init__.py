"""Decode attention on a CPU, compiled by Numba: `attend` of a few queries over all parts of a cache.

Read `attention` for the course of it, `tile` for what happens to 64 tokens, `primitives` and `vectors` for the
arithmetic. `layout` says where channels are in packed bytes, `arrays` how tensors get in; `door` is what is called.
"""

from .door import attend


__all__ = ["attend"]
