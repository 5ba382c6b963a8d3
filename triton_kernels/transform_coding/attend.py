"""Decode attention over transform-coded rows: nothing dense is ever written to memory.

A program takes one key/value head, up to 16 of its queries (8 where heads are wide) and one stretch of the sequence
(a split), and goes through it in tiles of up to 64 tokens. A tile's codes become levels in registers (`levels`), keys
over their deviations by a multiply-add with the token's scale and the channels' means; deviations are in the queries,
values' scales in the weights. The rotary embedding is done by the queries (`rotated_queries`). Values are summed as
they are coded, rotated by a Hadamard matrix, and the sum of a split is rotated back in the end (`tiles`).

In calibrated bases a tile's levels of keys become channels by two products with the head's basis, of the first and of
the second channels of pairs, which are rotated to the tile's start together. Values are summed as components of their
basis; the caller's `finish` multiplies their sums with it.

Legend: B batch, H key/value heads, T tokens, D head dim.
"""

import torch
import triton
import triton.language as tl

from ..attention.masks import mask_arguments
from ..attention.partials import Partials, device_num_sms, empty_partials, num_split_tiles
from ..launch import OPTIONS, Launch, tensor_arguments
from .attend_kernel import attend_kernel
from .launches import CodedRows, RotaryAngles


# The work of a program before and after its tiles is that of two tiles. With 512 tokens half of an
# H100's multiprocessors have nothing to do of 4096 tokens and eight heads
_MIN_TOKENS_PER_SPLIT = 128
_PROGRAMS_PER_SM = 2
_MIN_BLOCK_ROWS, _MAX_BLOCK_ROWS = 8, 16
# Channels up to which a tile of 64 tokens and the angles of its offsets fit into registers
_MOST_CHANNELS = 128
_BLOCK_CHANNELS = 16
# Of a key's channel, over its mean, where numbers are halves and where they are float32
LEAST_DEVIATION = (2.0**-11, 1e-6)


def prepare_rows(
    query: torch.Tensor,
    keys: CodedRows,
    values: CodedRows,
    angles: RotaryAngles | None,
    *,
    start: int,
    length: int,
    num_tokens: torch.Tensor | None = None,
    padding: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    scale: float,
    packed: bool,
    num_sms: int | None = None,
    only_scores: bool = False,
) -> Launch:
    """
    Prepare the launch that attends to rows: partial results, to be merged by `combine`. Values are components where
    they have a basis.

    If `only_scores` are wanted, its result is those instead, `[B, H, rows, T]`, float32, with numbers to the base of 2
    as the softmax has them; values are not read, and products are of halves whatever the query's dtype.

    Args:
        query (`torch.Tensor` of shape `[B, H, rows, D]`): queries. A row is `query head within the group * query
            tokens + query token`.
        keys, values (`CodedRows`): what to attend to.
        angles (`RotaryAngles`, *optional*): of the keys' rotary embedding; without it they are coded as they come.
        start (`int`): index of the first token.
        length (`int`): tokens in use, T, at least one; there may be room for more.
        num_tokens (`torch.Tensor` of shape `[1]`, integer, *optional*): tokens in use where the host does not know
            them, as it replays the launch; the grid is for `length`.
        padding (`torch.Tensor` of shape `[B]`, *optional*): tokens at the start of every item that have no position.
        mask (`torch.Tensor` of shape `[B or 1, H * groups or 1, query tokens or 1, T]`, *optional*): boolean (`True`
            attends) or added to the scores.
        scale (`float`): factor of the scores.
        packed (`bool`): whether arithmetic is on two halves at once, by instructions of NVIDIA's GPUs (`has_pairs`).
        num_sms (`int`, *optional*, defaults to the device's): multiprocessors to keep busy, which sets the number of
            splits.
    """
    batch_size, num_heads, num_rows, _ = query.shape
    query = query if query.stride(-1) == 1 else query.contiguous()
    key_layout, basis = keys.layout, keys.layout.basis
    is_float32 = query.dtype == torch.float32 and not only_scores
    # Channels of a tile; components that tensor cores add up are at least as many
    num_channels = block_channels(key_layout.head_dim)
    num_keys = block_channels(key_layout.num_coefficients)
    num_values = block_channels(values.layout.num_coefficients)
    widest = max(num_channels, num_values) if basis is None else num_channels
    block_rows, block_tokens, num_warps = tile_shape(
        widest, num_rows, has_basis=basis is not None, is_float32=is_float32
    )
    # Where keys are multiplied with two channels of queries, few queries are one operand with both
    has_two = angles is not None or basis is not None
    block_queries = block_rows // 2 if has_two and num_rows <= block_rows // 2 else block_rows
    num_row_blocks = triton.cdiv(num_rows, block_queries)
    num_programs = batch_size * num_heads * num_row_blocks
    num_sms = num_sms or device_num_sms(query.device)
    num_splits, tokens_per_split = split_rows(length, block_tokens, num_programs, num_sms)
    if only_scores:
        scores = query.new_empty(batch_size, num_heads, num_rows, length, dtype=torch.float32)
        partials = Partials(scores, None, None)  # type: ignore[arg-type]
    else:
        partials = empty_partials(query, num_splits, values.layout.num_coefficients)
    arguments = {
        **tensor_arguments("query", query, "bhr"),
        **mask_arguments(mask, num_heads, num_rows),
        **{f"{name}_ptr": tensor for name, tensor in partials._asdict().items()},
        **_side_arguments("key", keys),
        "key_order_ptr": contiguous(key_layout.order),
        "key_mean_ptr": contiguous(key_layout.mean),
        "basis_ptr": None if basis is None else basis.vectors,
        "step_ptr": None if basis is None else basis.steps,
        "factor_ptr": None if basis is None else basis.factors,
        **_side_arguments("value", values),
        **angle_arguments(angles),
        "padding_ptr": padding,
        "num_heads": num_heads,
        "num_rows": num_rows,
        "position": start,
        "length": length,
        "length_ptr": num_tokens,
        "tokens_per_split": tokens_per_split,
        "scale": scale,
        "KEY_DIM": key_layout.head_dim,
        "BASIS": basis is not None,
        "TWO_BITS": packed and not is_float32 and has_two_bits(values, num_values),
        "PADDED": padding is not None,
        "SCORES": only_scores,
        "LEAST_DEVIATION": LEAST_DEVIATION[is_float32],
        "DTYPE": tl.float32 if is_float32 else tl.float16,
        "PAIRS": packed and not is_float32,
        "BLOCK_Q": block_queries,
        "BLOCK_R": block_rows,
        "BLOCK_T": block_tokens,
        "BLOCK_D": block_channels((key_layout.head_dim + 1) // 2),
        "BLOCK_K": num_keys,
        "BLOCK_V": num_values,
        "VALUE_ROTATION": values.layout.head_dim & -values.layout.head_dim,
    }
    options = {**OPTIONS, "num_warps": num_warps, "num_stages": 1}
    result = partials.output if only_scores else partials
    return Launch(attend_kernel, (batch_size * num_heads, num_splits, num_row_blocks), arguments, options, result)


def _side_arguments(name: str, side: CodedRows) -> dict[str, object]:
    """The kernel arguments that keys and values both have."""
    return {
        **row_arguments(name, side.rows),
        f"{name}_width_ptr": contiguous(side.layout.widths),
        f"{name}_deviation_ptr": contiguous(side.layout.deviation),
        f"{name}_coefficient_ptr": side.coefficients,
        f"{name.upper()}_CODED": side.layout.num_coefficients,
    }


def row_arguments(name: str, rows: torch.Tensor) -> dict[str, object]:
    """The kernel arguments that say where rows `[B, H, T, R]` are."""
    row_size = rows.shape[3]
    rows = rows if rows.stride()[2:] == (row_size, 1) else rows.contiguous()
    return {**tensor_arguments(f"{name}_rows", rows, "bh"), f"{name.upper()}_ROW_SIZE": row_size}


def angle_arguments(angles: RotaryAngles | None) -> dict[str, object]:
    """The kernel arguments of a rotary embedding, or of none."""
    return {
        "partner_ptr": None if angles is None else angles.partners,
        "near_ptr": None if angles is None else angles.near,
        "far_ptr": None if angles is None else angles.far,
        "NUM_NEAR": 1 if angles is None else angles.near.shape[0],
        "ROTARY": angles is not None,
    }


def split_rows(length: int, block_tokens: int, num_programs: int, num_sms: int) -> tuple[int, int]:
    """Count the splits of rows, and the tokens of each, whole tiles: `num_programs` attend to every split."""
    num_tiles = triton.cdiv(length, block_tokens)
    least = triton.cdiv(_MIN_TOKENS_PER_SPLIT, block_tokens)
    tiles_per_split = num_split_tiles(num_tiles, num_programs, _PROGRAMS_PER_SM * num_sms, least)
    return triton.cdiv(num_tiles, tiles_per_split), tiles_per_split * block_tokens


def has_two_bits(values: CodedRows, num_values: int) -> bool:
    """Return True if all codes of values have two bits, and a tile of `num_values` numbers has a code for each."""
    layout = values.layout
    # Widths of values without a basis differ by one bit at most, so that two bits on average are two in every block
    is_full = layout.basis is None and layout.num_coefficients == num_values
    return is_full and layout.row_size == 1 + num_values // 4


def contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def block_channels(head_dim: int) -> int:
    """Channels of a tile."""
    return max(_BLOCK_CHANNELS, triton.next_power_of_2(head_dim))


def shared_bytes(head_dim: int, num_keys: int, num_values: int, *, is_float32: bool) -> int:
    """Bound the shared memory of a program, in bytes, by numbers of a key and of a value in their bases."""
    num_keys, num_values, num_pairs = map(block_channels, (num_keys, num_values, (head_dim + 1) // 2))
    num_rows, num_tokens, _ = tile_shape(2 * num_pairs, 1, has_basis=True, is_float32=is_float32)
    # Of halves first channels of pairs make room for second ones, and queries are operands in registers
    num_kept, num_queried = (2 * num_pairs, num_rows * num_pairs) if is_float32 else (num_pairs, 0)
    numbers = 2 * num_pairs * num_keys + num_tokens * max(num_kept, num_keys, num_values) + num_queried
    # And what reductions take, of which 1024 have been seen
    return (4 if is_float32 else 2) * numbers + 2048


def tile_shape(num_channels: int, num_rows: int, *, has_basis: bool, is_float32: bool) -> tuple[int, int, int]:
    """Rows and tokens of a tile, and warps that share it."""
    if has_basis:
        # A product with few columns is the same work for every four warps
        is_small = num_channels <= _MOST_CHANNELS and not is_float32
        return _MIN_BLOCK_ROWS, (16 if is_float32 else 64), (4 if is_small else 8)
    most_rows = _MAX_BLOCK_ROWS if num_channels <= _MOST_CHANNELS else _MIN_BLOCK_ROWS
    block_rows = min(max(triton.next_power_of_2(num_rows), _MIN_BLOCK_ROWS), most_rows)
    is_small = num_channels <= _MOST_CHANNELS and block_rows == _MIN_BLOCK_ROWS
    if is_float32:
        return block_rows, (32 if is_small else 16), 8
    return block_rows, *((64, 4) if is_small else (32, 8))
