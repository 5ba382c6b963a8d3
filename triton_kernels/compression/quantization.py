"""Quantization of chunks and packing of the codes, in one kernel or two.

Legend: B batch, H key/value heads, M chunks, L tokens a chunk, D head dim, G groups, P bytes a token. The layout of
the bytes is told in `packing`.

A program finds the range of its groups, stores their scales and zeros, and reads those back when it packs: channels
are grouped one way for the range and laid out another way for the slabs, and the round trip through the GPU's cache
turns the one layout into the other. The states are read again too, also from the cache. Long groups of one channel are
too few to fill a GPU with, so there range and packing are launched one after the other, each split its own way.

What the codes miss of each value can be written along with them: it is known here without unpacking anything.

A scale or zero that is not finite tells that the states exceed float16 or are NaN. A number in the GPU's memory is set
then, so that many launches can be looked at with one synchronization.
"""

import torch

from .quantize_channels import quantize_channels
from .quantize_tokens import quantize_tokens


def quantize_and_pack(
    states: torch.Tensor,
    keep: torch.Tensor | None,
    nbits: int,
    axis: str,
    group_size: int | None,
    missing: torch.Tensor | None = None,
    exceeded: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Quantizes chunks of keys or values and packs the codes.

    Args:
        states (`torch.Tensor` of shape `[B, H, M, L, D]`, floating point, any strides):
            What to quantize; computed with in float32.
        keep (`torch.Tensor` broadcastable to the states, bool, *optional*):
            Which values may widen the range of their group. The others are clamped into it.
        nbits (`int`):
            Bits a code, one of 2, 3, 4, 8.
        axis (`str`):
            `"channel"`, groups of consecutive tokens of a channel, or `"token"`, groups of channels of a token.
        group_size (`int`, *optional*):
            Length of a group, a divisor of L or D. `None`: all tokens, or all channels of all heads.
        missing (`torch.Tensor` of shape `[B, H, M, L, D]`, float32, contiguous, *optional*):
            Filled with the states less what codes, scales and zeros stand for.
        exceeded (`torch.Tensor` of shape `[1]`, int32, *optional*):
            Set to 1 if a scale or zero is not finite.

    Returns:
        `codes` (uint8, `[B, H, M, L, P]`), `scale` and `zero` (float16, `[B, H, M, G, D]` by channel,
        `[B, H or 1, M, L, G]` by token), all contiguous. A group whose range does not fit float16, or that has a NaN
        among what is kept, has a scale or zero that is not finite.
    """
    batch_size, num_heads, num_chunks, chunk_length, head_dim = states.shape
    num_bytes = -(-head_dim // 4) + -(-head_dim // 8) if nbits == 3 else -(-head_dim // (8 // nbits))
    heads_share = axis == "token" and group_size is None
    size = group_size or (chunk_length if axis == "channel" else head_dim)
    num_groups = (chunk_length if axis == "channel" else head_dim) // size
    num_range_heads = 1 if heads_share else num_heads
    last_dims = (num_groups, head_dim) if axis == "channel" else (chunk_length, num_groups)
    codes = states.new_empty(batch_size, num_heads, num_chunks, chunk_length, num_bytes, dtype=torch.uint8)
    scale = states.new_empty(batch_size, num_range_heads, num_chunks, *last_dims, dtype=torch.float16)
    zero = torch.empty_like(scale)
    if codes.numel() == 0:
        return codes, scale, zero
    assert num_groups * size == (chunk_length if axis == "channel" else head_dim)
    keep = None if keep is None else keep.expand_as(states)
    quantize = quantize_channels if axis == "channel" else quantize_tokens
    quantize(states, keep, codes, scale, zero, missing, exceeded, nbits=nbits, group_size=size)
    return codes, scale, zero
