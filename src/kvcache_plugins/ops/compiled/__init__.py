"""Decode attention on a CPU, compiled by Numba: `attend` of a few queries over all parts of a cache.

Read `attention` for the course of it, `tile` for what happens to 64 tokens, `primitives` and `vectors` for the
arithmetic. `layout` says where channels are in packed bytes, `arrays` how tensors get in; `door` is what is called.
"""

from pathlib import Path

from .machine_code import kept_beside


# All modules that decorate functions, also those that `ops.gather` asks for by itself
with kept_beside(Path(__file__).parents[1]):
    from . import choice, chosen_attention, code_scores, grouped_scores, largest, rows
    from .door import attend, prepare
    from .transform_coder import encode_rows as encode_transform_rows
    from .transform_decoder import decode_rows as decode_transform_rows
    from .transform_decoder import turn_states


__all__ = [
    "attend",
    "choice",
    "chosen_attention",
    "code_scores",
    "decode_transform_rows",
    "encode_transform_rows",
    "grouped_scores",
    "largest",
    "prepare",
    "rows",
    "turn_states",
]
