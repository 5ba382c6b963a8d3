"""Decode attention on a CPU, compiled by Numba: `attend` of a few queries over all parts of a cache.

Read `attention` for the course of it, `tile` for what happens to 64 tokens, `primitives` and `vectors` for the
arithmetic. `layout` says where channels are in packed bytes, `arrays` how tensors get in; `door` is what is called.
"""

from pathlib import Path

from .machine_code import kept_beside


# All modules that decorate functions
with kept_beside(Path(__file__).parents[1]):
    from .door import attend, prepare
    from .transform_coder import encode_rows as encode_transform_rows
    from .transform_decoder import decode_rows as decode_transform_rows
    from .transform_decoder import turn_states
    from .transform_door import attend_rows as attend_transform_rows
    from .transform_door import prepare_rows as prepare_transform_rows


__all__ = [
    "attend",
    "attend_transform_rows",
    "decode_transform_rows",
    "encode_transform_rows",
    "prepare",
    "prepare_transform_rows",
    "turn_states",
]
