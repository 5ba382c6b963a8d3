"""What Numba still compiles: `primitives` and `vectors` are the arithmetic, `arrays` how tensors get in."""

from pathlib import Path

from .machine_code import kept_beside


# All modules that decorate functions, also those that `ops.gather` asks for by itself
with kept_beside(Path(__file__).parents[1]):
    from . import choice, chosen_attention, code_scores, grouped_scores, largest, rows
    from .transform_coder import encode_rows as encode_transform_rows
    from .transform_decoder import decode_rows as decode_transform_rows
    from .transform_decoder import turn_states


__all__ = [
    "choice",
    "chosen_attention",
    "code_scores",
    "decode_transform_rows",
    "encode_transform_rows",
    "grouped_scores",
    "largest",
    "rows",
    "turn_states",
]
