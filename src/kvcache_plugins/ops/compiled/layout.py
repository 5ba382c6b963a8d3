"""Where the channels of packed codes are, as vectors of eight bytes: what the compiled attention walks along.

A vector is eight neighbouring bytes of a token and the bits of one plane in each: eight channels. The legend of the
packing is in `ops.quantization`.
"""

from functools import cache
from typing import NamedTuple

import numpy as np

from kvcache_plugins.ops.quantization import packed_planes

from .vectors import LANES


class CodeLayout(NamedTuple):
    """
    The vectors that hold the codes of a token, V of them, an even number in every group.

    Attributes:
        places (`np.ndarray` of shape `[V]`, int64): first byte within the token's.
        masks (`np.ndarray` of shape `[V]`, int32): which bits of a byte.
        weights (`np.ndarray` of shape `[V]`, float32): what the masked bits have to be multiplied by.
        channels (`np.ndarray` of shape `[V, 8]`, int64): the channel of every lane; -1 where the lane does not count.
        in_order (`np.ndarray` of shape `[V]`, uint8): whether the lanes are eight channels in their order.
        group_ends (`np.ndarray` of shape `[groups + 1]`, int64): the vectors of group `g` are those from
            `group_ends[g]` on, up to the next.
        row_size (`int`): bytes that a token has to have for all vectors to be read.
    """

    places: np.ndarray
    masks: np.ndarray
    weights: np.ndarray
    channels: np.ndarray
    in_order: np.ndarray
    group_ends: np.ndarray
    row_size: int


# Never forgotten: tables of addresses point to it
@cache
def code_layout(nbits: int, head_dim: int, num_groups: int) -> CodeLayout:
    """
    The vectors of a token's codes.

    Args:
        nbits (`int`): bits a code.
        head_dim (`int`): channels.
        num_groups (`int`): groups of neighbouring channels that have a scale each.
    """
    planes = packed_planes(head_dim, nbits)
    row_size = max(sum(size for _, _, size in planes), LANES)
    group_size = head_dim // num_groups
    vectors: list[list[tuple[int, int, float, list[int]]]] = [[] for _ in range(num_groups)]
    first_byte = 0
    for width, shift, size in planes:
        for slab in range(8 // width):
            for offset in range(0, size, LANES):
                # The last vector of a row may not reach beyond it: lanes it shares with the one before do not count
                place = min(first_byte + offset, row_size - LANES)
                columns = [place + lane - first_byte for lane in range(LANES)]
                channels = [slab * size + j if offset <= j < size else -1 for j in columns]
                channels = [channel if channel < head_dim else -1 for channel in channels]
                mask, weight = (2**width - 1) << (slab * width), 2.0 ** (shift - slab * width)
                for group in {channel // group_size for channel in channels if channel >= 0}:
                    own = [channel if channel >= 0 and channel // group_size == group else -1 for channel in channels]
                    vectors[group].append((place, mask, weight, own))
        first_byte += size
    for members in vectors:
        if len(members) % 2:
            members.append((0, 0, 0.0, [-1] * LANES))
    places, masks, weights, lanes = zip(*(vector for members in vectors for vector in members), strict=True)
    in_order = [own[0] >= 0 and own == list(range(own[0], own[0] + LANES)) for own in lanes]
    return CodeLayout(
        places=np.array(places, dtype=np.int64),
        masks=np.array(masks, dtype=np.int32),
        weights=np.array(weights, dtype=np.float32),
        channels=np.array(lanes, dtype=np.int64),
        in_order=np.array(in_order, dtype=np.uint8),
        group_ends=np.cumsum([0, *map(len, vectors)], dtype=np.int64),
        row_size=row_size,
    )
