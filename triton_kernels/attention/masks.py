"""Attention masks: how a kernel is given one, and how it applies it to a tile of scores."""

import torch
import triton
import triton.language as tl

from ..arithmetic import LOG2_E


def mask_arguments(
    mask: torch.Tensor | None, num_heads: int, num_rows: int, prefix: str = "mask"
) -> dict[str, object]:
    """The kernel arguments for a mask `[B or 1, query heads or 1, query tokens or 1, T]`, `num_queries` among them."""
    names = [f"{prefix}_stride_{dimension}" for dimension in "bhqt"]
    query_name = "num_queries" if prefix == "mask" else f"{prefix}_num_queries"
    if mask is None:
        return {f"{prefix}_ptr": None, **dict.fromkeys(names, 0), query_name: 1, prefix.upper(): 0}
    _, mask_heads, num_queries, _ = mask.shape
    if num_queries == 1 and mask_heads > 1:
        num_queries = num_rows // (mask_heads // num_heads)
    # A dimension of one is shared by all
    strides = [0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True)]
    strides[3] = mask.stride(3)
    kind = 1 if mask.dtype == torch.bool else 2
    pointer = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    return {
        f"{prefix}_ptr": pointer,
        **dict(zip(names, strides, strict=True)),
        query_name: num_queries,
        prefix.upper(): kind,
    }


@triton.jit
def mask_row_offsets(rows, num_rows, num_queries, batch, head, stride_b, stride_h, stride_q):
    """Return the offset of each query row's mask, in elements."""
    query_head = head * (num_rows // num_queries) + rows // num_queries
    return batch * stride_b + query_head * stride_h + rows % num_queries * stride_q


@triton.jit
def mask_scores(scores, mask_ptrs, in_use, MASK: tl.constexpr):
    """Apply a mask (1: nonzero attends, 2: added to the natural scores) to scores in base 2, all of one shape."""
    if MASK == 1:
        allowed = tl.load(mask_ptrs, mask=in_use, other=0)
        scores = tl.where(allowed != 0, scores, float("-inf"))
    elif MASK == 2:
        bias = tl.load(mask_ptrs, mask=in_use, other=0.0).to(tl.float32)
        # The lowest float32, which Transformers masks with, must stay finite: such rows attend uniformly, as elsewhere
        scaled = tl.maximum(bias * LOG2_E, -3.0e38)
        scores += tl.where(bias == float("-inf"), float("-inf"), scaled)
    return tl.where(in_use, scores, float("-inf"))
