"""The custom operator `torch.ops.kvcache_plugins.decode_attention`: a few queries against everything a layer holds.

An operator is opaque to `torch.compile` and CUDA graphs, which need only to know what comes out: the queries' shape
and dtype. It takes tensors in flat lists, which `flatten_parts` makes of a cache's parts. Outside of a compiled graph
the same code is called without it: lists of fifty tensors cost PyTorch's dispatcher some 80 microseconds a layer.
"""

from collections.abc import Sequence
from typing import Any

import torch

from kvcache_plugins.codecs.groups import TENSOR_NAMES, CompressedStates
from kvcache_plugins.codecs.quantization import Grouping

from .parts import CompressedPart, DensePart


_SIDE_LAYOUT = ("nbits", "by_channel", "group_size", "head_dim", "is_rotated")


def _side_layout(states: CompressedStates) -> list[int]:
    grouping = states.grouping
    return [
        states.nbits,
        int(grouping.axis == "channel"),
        grouping.group_size or 0,
        states.head_dim,
        int(states.is_rotated),
    ]


def flatten_parts(
    parts: Sequence[DensePart | CompressedPart],
) -> tuple[list[torch.Tensor], list[torch.Tensor | None], list[torch.Tensor | None], list[int], list[int]]:
    """Parts as the operator takes them: dense states, compressed tensors, and of dense parts first masks and lengths;
    in the end the numbers that compressed sides have beside their tensors."""
    dense = [part for part in parts if isinstance(part, DensePart)]
    compressed = [part for part in parts if isinstance(part, CompressedPart)]
    states = [tensor for part in dense for tensor in (part.keys, part.values)]
    tensors = [
        getattr(side, name) for part in compressed for side in (part.keys, part.values) for name in TENSOR_NAMES
    ]
    layout = [number for part in compressed for side in (part.keys, part.values) for number in _side_layout(side)]
    ordered: list[DensePart | CompressedPart] = [*dense, *compressed]
    return states, tensors, [part.mask for part in ordered], [part.length for part in ordered], layout


def _unflatten_side(tensors: Sequence[torch.Tensor | None], layout: Sequence[int]) -> CompressedStates:
    nbits, by_channel, group_size, head_dim, is_rotated = layout
    grouping = Grouping("channel" if by_channel else "token", group_size or None)
    fields: dict[str, Any] = dict(zip(TENSOR_NAMES, tensors, strict=True))
    return CompressedStates(**fields, nbits=nbits, grouping=grouping, head_dim=head_dim, is_rotated=bool(is_rotated))


def _unflatten_parts(
    states: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor | None],
    masks: Sequence[torch.Tensor | None],
    lengths: Sequence[int],
    layout: Sequence[int],
) -> tuple[list[DensePart], list[CompressedPart]]:
    num_dense, step, size = len(states) // 2, len(TENSOR_NAMES), len(_SIDE_LAYOUT)
    dense = [DensePart(states[2 * i], states[2 * i + 1], lengths[i], masks[i]) for i in range(num_dense)]
    sides = [
        _unflatten_side(tensors[i * step : (i + 1) * step], layout[i * size : (i + 1) * size])
        for i in range(len(tensors) // step)
    ]
    compressed = [
        CompressedPart(sides[2 * i], sides[2 * i + 1], lengths[num_dense + i], masks[num_dense + i])
        for i in range(len(sides) // 2)
    ]
    return dense, compressed


def run_kernel(
    query: torch.Tensor, dense: Sequence[DensePart], compressed: Sequence[CompressedPart], scale: float, kernel: str
) -> torch.Tensor:
    """What the operator does, given parts."""
    # Imported late, as each needs a package that may not be there
    if kernel == "triton":
        from .triton_attention import attend as attend_with_triton

        return attend_with_triton(query, dense, compressed, scale)
    from kvcache_plugins.kernels.groups import attend as attend_compiled

    return attend_compiled(query, dense, compressed, scale)


@torch.library.custom_op("kvcache_plugins::decode_attention", mutates_args=())
def decode_attention(
    query: torch.Tensor,
    states: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor | None],
    masks: Sequence[torch.Tensor | None],
    lengths: Sequence[int],
    layout: Sequence[int],
    scale: float,
    kernel: str,
) -> torch.Tensor:
    """
    Attention of a few queries over dense and compressed parts.

    Args:
        query (`torch.Tensor` of shape `[B, H * G, Q, D]`): queries.
        states, tensors, masks, lengths, layout: what `flatten_parts` returned.
        scale (`float`): factor of the scores.
        kernel (`str`): `"compiled"` or `"triton"`.

    Returns:
        `torch.Tensor` of shape `[B, H * G, Q, value head dim]` in the queries' dtype.
    """
    return run_kernel(query, *_unflatten_parts(states, tensors, masks, lengths, layout), scale, kernel)


@decode_attention.register_fake
def _fake(
    query: torch.Tensor,
    states: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor | None],
    masks: Sequence[torch.Tensor | None],
    lengths: Sequence[int],
    layout: Sequence[int],
    scale: float,
    kernel: str,
) -> torch.Tensor:
    value_head_dim = layout[_SIDE_LAYOUT.index("head_dim") - len(_SIDE_LAYOUT)] if layout else states[1].shape[3]
    return query.new_empty(*query.shape[:3], value_head_dim)
