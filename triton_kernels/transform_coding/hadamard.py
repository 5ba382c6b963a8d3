"""Sums of rotated values turned back: a product with a Hadamard matrix, whose signs are made, not loaded.

Sylvester's matrix has -1 where row and column have an odd number of bits in common. Legend as in `attend.py`.
"""

# The parameters of kernels are pointers, numbers and blocks: no Python types
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from kvcache_plugins.triton_kernels.dot import dot_parts
from kvcache_plugins.triton_kernels.powers import inverse_power, power_below

from .tiles import store_outputs


# Channels that come of one product: of more, registers could not hold the matrix
_BLOCK_CHANNELS = tl.constexpr(64)


@triton.jit
def store_rotated(output_ptr, places, slots, row_in_use, output, DIM: tl.constexpr, SIZE: tl.constexpr):
    """
    Stores outputs `[BLOCK_V, rows]`, whose channels are `slots`, turned back; every `SIZE` channels, a power of two,
    were rotated together.
    """
    # Slots of no channel may hold anything
    output = tl.where((slots < DIM)[:, None], output, 0.0)
    # Two halves hold 22 bits of what is at most 2
    power = power_below(tl.max(tl.abs(output), axis=0))
    output *= inverse_power(power)[None, :]
    power *= SIZE**-0.5
    BLOCK: tl.constexpr = min(_BLOCK_CHANNELS, output.shape[0])
    for first in tl.static_range(0, output.shape[0], BLOCK):
        channels = first + tl.arange(0, BLOCK)
        signs = _signs(channels[:, None], slots[None, :], SIZE)
        turned = dot_parts(signs, output, tl.zeros([BLOCK, output.shape[1]], tl.float32), 2) * power[None, :]
        store_outputs(output_ptr, places, channels, row_in_use, turned, DIM)


@triton.jit
def _signs(rows, columns, SIZE: tl.constexpr):
    """1 and -1 of the matrix, 0 between channels that were not rotated together, in float16."""
    common = rows & columns & (SIZE - 1)
    for shift in tl.static_range(4):
        common ^= common >> (8 >> shift)
    signs = 1.0 - 2.0 * (common & 1).to(tl.float16)
    return tl.where(rows // SIZE == columns // SIZE, signs, 0.0).to(tl.float16)
