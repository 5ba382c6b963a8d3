"""Keys and values of tokens coded as rows by the tables of a prompt: one launch a side.

A program takes a tile of tokens of one head. Values are rotated by a product with a matrix of signs; of keys the
rotary embedding is undone, channels being loaded in the order of their rows. What comes of it is coded in registers
(`coding_tiles`).

Legend: B batch, H key/value heads, T tokens, D head dim, R bytes of a row.
"""

# The parameters of kernels are pointers, numbers and blocks: no Python types
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

from kvcache_plugins.codecs.rows import RowTable
from kvcache_plugins.triton_kernels.dot import dot_exact
from kvcache_plugins.triton_kernels.kept_launch import ALIGNMENT

from .attend import angle_arguments, block_channels
from .coding_tiles import head_states, load_states, row_places, store_rows, tile_tokens
from .launches import Codebook, CodingLaunch, RotaryAngles


# Channels that a product adds up at a time, and tokens of its tile
_PRODUCT_CHANNELS = 32
_PRODUCT_TOKENS = 32
# Channels up to which four warps have registers enough for a product
_FEW_CHANNELS = 64
# Numbers of the tile of a single warp
_NUMBERS_OF_WARP = 512
# Parts of float32 in a product: 33 bits
_NUM_PARTS = tl.constexpr(3)
# What differs from prompt to prompt or step to step: a kernel for each divisibility would gain nothing
NOT_SPECIALIZED = [
    *(f"states_stride_{dimension}" for dimension in "bht"),
    "num_heads",
    "num_matrices",
    "position",
    "length",
]


@triton.jit(do_not_specialize=NOT_SPECIALIZED, do_not_specialize_on_alignment=["states_ptr"])
def code_rows_kernel(
    states_ptr,
    states_stride_b,
    states_stride_h,
    states_stride_t,
    sign_ptr,
    order_ptr,
    mean_ptr,
    deviation_ptr,
    width_ptr,
    partner_ptr,
    near_ptr,
    far_ptr,
    padding_ptr,
    coefficient_ptr,
    cell_code_ptr,
    cell_bound_ptr,
    rows_ptr,
    num_heads,
    num_matrices,
    position,
    length,
    HEAD_DIM: tl.constexpr,
    NUM_DEVIATIONS: tl.constexpr,
    ROW_SIZE: tl.constexpr,
    FACTOR: tl.constexpr,
    NUM_NEAR: tl.constexpr,
    ROTARY: tl.constexpr,
    PADDED: tl.constexpr,
    ROTATED: tl.constexpr,
    ALIGNED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BY_ENERGY: tl.constexpr,
    NUM_REFITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Rows of up to `BLOCK_T` tokens of one head."""
    matrix = (tl.program_id(0) % num_matrices).to(tl.int64)
    batch, head = matrix // num_heads, matrix % num_heads
    tokens, token_in_use = tile_tokens(tl.program_id(0) // num_matrices, length, BLOCK_T)
    # fmt: off
    states_ptr, stride_t = head_states(
        states_ptr, states_stride_t, batch, head, states_stride_b, states_stride_h, ALIGNED)
    # fmt: on
    places = row_places(BLOCK_K)
    place_in_use = places < HEAD_DIM
    positions = position + tokens
    if PADDED:
        positions -= tl.load(padding_ptr + batch).to(tl.int32)
    channels = places
    if order_ptr is not None:
        channels = tl.load(order_ptr + matrix * HEAD_DIM + places, mask=place_in_use, other=0).to(tl.int32)
    if ROTATED:
        normal = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
        for first in range(0, HEAD_DIM, BLOCK_C):
            own = first + tl.arange(0, BLOCK_C)
            own_in_use = own < HEAD_DIM
            # fmt: off
            states = load_states(
                states_ptr, stride_t, tokens, own, own_in_use, positions, partner_ptr, near_ptr, far_ptr, HEAD_DIM,
                NUM_NEAR, False)
            # fmt: on
            sign_ptrs = sign_ptr + own[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
            signs = tl.load(sign_ptrs, mask=own_in_use[:, None], other=0.0)
            if states_ptr.dtype.element_ty == sign_ptr.dtype.element_ty:
                normal = tl.dot(states.to(signs.dtype), signs, normal)
            else:
                normal += dot_exact(states, signs, _NUM_PARTS)
    else:
        # fmt: off
        normal = load_states(
            states_ptr, stride_t, tokens, channels, place_in_use, positions, partner_ptr, near_ptr, far_ptr, HEAD_DIM,
            NUM_NEAR, ROTARY)
        # fmt: on
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + matrix * HEAD_DIM + channels, mask=place_in_use, other=0.0).to(tl.float32)
        normal -= mean[None, :]
    if NUM_DEVIATIONS > 1:
        deviation = tl.load(deviation_ptr + matrix * HEAD_DIM + channels, mask=place_in_use, other=0.0)
    else:
        deviation = tl.load(deviation_ptr + matrix + 0 * places)
    deviation = deviation.to(tl.float32)
    # A channel that does not vary is its mean
    inverse = tl.where(deviation > 0, tl.div_rn(1.0, tl.where(deviation > 0, deviation, 1.0)), 0.0) * FACTOR
    # fmt: off
    store_rows(
        normal * inverse[None, :], tokens, token_in_use, width_ptr + matrix * ((HEAD_DIM + 7) // 8), coefficient_ptr,
        cell_code_ptr, cell_bound_ptr, rows_ptr + matrix * length * ROW_SIZE, ROW_SIZE, (HEAD_DIM + 7) // 8, WEIGHTED,
        BY_ENERGY, NUM_REFITS)
    # fmt: on


def prepare_coding(
    states: torch.Tensor,
    table: RowTable,
    codebook: Codebook,
    signs: torch.Tensor | None = None,
    angles: RotaryAngles | None = None,
    *,
    start: int = 0,
    padding: torch.Tensor | None = None,
) -> CodingLaunch:
    """
    The launch that codes keys or values.

    Args:
        states (`torch.Tensor` of shape `[B, H, T, D]`):
            Float32, float16 or bfloat16.
        table (`RowTable`):
            How they are coded.
        codebook (`Codebook`):
            Of the side.
        signs (`torch.Tensor` of shape `[D, channels of a tile]`, *optional*):
            What states are multiplied with before: a Hadamard matrix of ones, of their dtype or else of float16, its
            columns at their places of a tile. The mean has then been taken off.
        angles (`RotaryAngles`, *optional*):
            Of the rotary embedding that is undone.
        start (`int`, *optional*, defaults to 0):
            Index of the first token.
        padding (`torch.Tensor` of shape `[B]`, *optional*):
            Tokens at the start of every item that have no position.
    """
    num_channels, is_rotated, deviation = block_channels(table.head_dim), signs is not None, table.deviation
    assert deviation is not None, "tables of a prompt have deviations"
    block_tokens, num_warps = _tile_shape(num_channels, is_rotated=is_rotated)
    rows = states.new_empty(*states.shape[:3], table.row_size, dtype=torch.uint8)
    size = table.head_dim & -table.head_dim
    arguments = {
        **coding_arguments(states, rows, table, codebook, angles, start, padding),
        "mean_ptr": None if is_rotated or table.mean is None else table.mean.contiguous(),
        "sign_ptr": signs,
        "order_ptr": None if table.order is None else table.order.contiguous(),
        "deviation_ptr": deviation.contiguous(),
        "NUM_DEVIATIONS": deviation.shape[2],
        "FACTOR": size**-0.5 if is_rotated else 1.0,
        "ROTATED": is_rotated,
        "BY_ENERGY": False,
        "NUM_REFITS": 0,
        "BLOCK_T": block_tokens,
        "BLOCK_C": min(_PRODUCT_CHANNELS, num_channels),
        "BLOCK_K": num_channels,
    }
    return CodingLaunch(code_rows_kernel, arguments, {"num_warps": num_warps, "num_stages": 1}, rows)


def coding_arguments(
    states: torch.Tensor,
    rows: torch.Tensor,
    table: RowTable,
    codebook: Codebook,
    angles: RotaryAngles | None,
    start: int,
    padding: torch.Tensor | None,
) -> dict[str, object]:
    """The kernel arguments of all coding: of states `[B, H, T, D]`, rows `[B, H, T, R]` and any table."""
    states = states if states.stride(3) == 1 else states.contiguous()
    batch_size, num_heads, length, _ = states.shape
    # In units that are loaded together
    is_aligned = states.data_ptr() % ALIGNMENT == 0 and all(stride % ALIGNMENT == 0 for stride in states.stride()[:3])
    return {
        "states_ptr": states,
        "states_stride_b": states.stride(0),
        "states_stride_h": states.stride(1),
        "states_stride_t": states.stride(2),
        "width_ptr": table.widths.contiguous(),
        **angle_arguments(angles),
        "padding_ptr": padding,
        **codebook.arguments(),
        "rows_ptr": rows,
        "num_heads": num_heads,
        "num_matrices": batch_size * num_heads,
        "position": start,
        "length": length,
        "HEAD_DIM": table.head_dim,
        "ROW_SIZE": table.row_size,
        "PADDED": padding is not None,
        "ALIGNED": is_aligned,
        "WEIGHTED": table.is_weighted,
    }


def _tile_shape(num_channels: int, *, is_rotated: bool) -> tuple[int, int]:
    """Tokens of a tile, and warps that share it: one where nothing else asks for more, which sums within itself."""
    if is_rotated:
        return _PRODUCT_TOKENS, 4 if num_channels <= _FEW_CHANNELS else 8
    return max(_NUMBERS_OF_WARP // num_channels, 1), 1
