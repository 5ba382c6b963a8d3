"""Parts of the sequence that are stored as they are: the first tokens, the newest tokens.

Legend as in `attend.py`; T tokens of a part.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..arithmetic import update_softmax
from ..launch import tensor_arguments
from .masks import mask_arguments, mask_row_offsets, mask_scores


class DensePart(NamedTuple):
    """
    A short stretch of the sequence that is stored as it is.

    Args:
        keys, values (`torch.Tensor` of shape `[B, H, T, D]`): the states.
        mask (`torch.Tensor` of shape `[B or 1, H * groups or 1, query tokens or 1, T]`, *optional*): boolean (`True`
            attends) or added to the scores.
        num_tokens (`torch.Tensor` of shape `[1]`, integer, *optional*): tokens in use, at most T, where the host does
            not know them.
    """

    keys: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor | None = None
    num_tokens: torch.Tensor | None = None


def part_arguments(
    index: int, part: DensePart | None, num_heads: int, num_rows: int, *, is_spare: bool = False
) -> dict[str, object]:
    """List the arguments of `combine_kernel` for an exact part, if there is any; one that `is_spare` has no tokens."""
    arguments: dict[str, object] = {}
    for name in ("keys", "values"):
        states = None if part is None else getattr(part, name)
        if states is not None and states.stride(-1) != 1:
            states = states.contiguous()
        arguments |= tensor_arguments(f"{name}_{index}", states, "bht")
    mask = None if part is None else part.mask
    return {
        **arguments,
        **mask_arguments(mask, num_heads, num_rows, f"mask_{index}"),
        f"num_tokens_{index}": 0 if is_spare or part is None else part.keys.shape[2],
        f"num_tokens_{index}_ptr": None if is_spare or part is None else part.num_tokens,
    }


@triton.jit
def attend_part(
    output, maximum, total, query, rows, first_channel, num_rows, keys_ptr, keys_stride_b, keys_stride_h,
    keys_stride_t, values_ptr, values_stride_b, values_stride_h, values_stride_t, mask_ptr, mask_stride_b,
    mask_stride_h, mask_stride_q, mask_stride_t, num_queries, num_tokens, num_tokens_ptr, batch, head, scale_base_2,
    MASK: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PRECISION: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Update output, maximum and total of the online softmax by one exact part."""
    if num_tokens_ptr is not None:
        num_tokens = tl.load(num_tokens_ptr).to(tl.int32)
    row_in_use = rows < num_rows
    key_channels = tl.arange(0, BLOCK_K)
    value_channels = first_channel + tl.arange(0, BLOCK_V)
    keys_ptr += batch * keys_stride_b + head * keys_stride_h
    values_ptr += batch * values_stride_b + head * values_stride_h
    mask_rows = mask_row_offsets(rows, num_rows, num_queries, batch, head, mask_stride_b, mask_stride_h, mask_stride_q)
    for first_token in range(0, num_tokens, BLOCK_T):
        tokens = first_token + tl.arange(0, BLOCK_T)
        token_in_use = tokens < num_tokens
        tokens = tl.cast(tokens, tl.int64)
        keys = tl.load(
            keys_ptr + tokens[:, None] * keys_stride_t + key_channels[None, :],
            mask=token_in_use[:, None] & (key_channels < KEY_DIM)[None, :],
            other=0.0,
        ).to(tl.float32)
        scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * scale_base_2
        in_use = row_in_use[:, None] & token_in_use[None, :]
        mask_ptrs = mask_ptr
        if MASK:
            mask_ptrs = mask_ptr + mask_rows[:, None] + tokens[None, :] * mask_stride_t
        scores = mask_scores(scores, mask_ptrs, in_use, MASK)
        probabilities, decay, maximum, total = update_softmax(scores, maximum, total, 1)
        values = tl.load(
            values_ptr + tokens[:, None] * values_stride_t + value_channels[None, :],
            mask=token_in_use[:, None] & (value_channels < VALUE_DIM)[None, :],
            other=0.0,
        ).to(tl.float32)
        output = output * decay[:, None] + tl.dot(probabilities, values, input_precision=PRECISION)
    return output, maximum, total
