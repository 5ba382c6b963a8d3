"""The custom operator `torch.ops.kvcache_plugins.decode_attention`: a few queries against everything a layer holds.

An operator is opaque to `torch.compile` and CUDA graphs, which need only to know what comes out: the queries' shape
and dtype. It takes tensors in flat lists, which `flatten_parts` makes of a cache's parts. Outside of a compiled graph
the same code is called without it: lists of fifty tensors cost PyTorch's dispatcher some 80 microseconds a layer.
"""

from collections.abc import Sequence
from typing import Any

import torch

from .compressed_states import TENSOR_NAMES, CompressedStates
from .parts import CompressedPart, DensePart
from .quantization import Grouping


_SIDE_LAYOUT = ("nbits", "by_channel", "group_size", "head_dim")


def _side_layout(states: CompressedStates) -> list[int]:
    grouping = states.grouping
    return [states.nbits, int(grouping.axis == "channel"), grouping.group_size or 0, states.head_dim]


def flatten_parts(
    parts: Sequence[DensePart | CompressedPart],
) -> tuple[list[torch.Tensor], list[torch.Tensor | None], list[torch.Tensor | None], list[int]]:
    """Parts as the operator takes them: dense states, compressed tensors, masks (dense parts first) and numbers."""
    dense = [part for part in parts if isinstance(part, DensePart)]
    compressed = [part for part in parts if isinstance(part, CompressedPart)]
    states = [tensor for part in dense for tensor in (part.keys, part.values)]
    tensors = [
        getattr(side, name) for part in compressed for side in (part.keys, part.values) for name in TENSOR_NAMES
    ]
    layout = [
        number for part in compressed for number in (part.length, *_side_layout(part.keys), *_side_layout(part.values))
    ]
    masks = [part.mask for part in dense] + [part.mask for part in compressed]
    return states, tensors, masks, layout


def _unflatten_side(tensors: Sequence[torch.Tensor | None], layout: Sequence[int]) -> CompressedStates:
    nbits, by_channel, group_size, head_dim = layout
    grouping = Grouping("channel" if by_channel else "token", group_size or None)
    fields: dict[str, Any] = dict(zip(TENSOR_NAMES, tensors, strict=True))
    return CompressedStates(**fields, nbits=nbits, grouping=grouping, head_dim=head_dim)


def _unflatten_parts(
    states: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor | None],
    masks: Sequence[torch.Tensor | None],
    layout: Sequence[int],
) -> tuple[list[DensePart], list[CompressedPart]]:
    num_dense, step, size = len(states) // 2, len(TENSOR_NAMES), len(_SIDE_LAYOUT)
    dense = [DensePart(states[2 * i], states[2 * i + 1], masks[i]) for i in range(num_dense)]
    compressed = []
    for i, mask in enumerate(masks[num_dense:]):
        length, *numbers = layout[i * (2 * size + 1) : (i + 1) * (2 * size + 1)]
        sides = tensors[2 * i * step : 2 * (i + 1) * step]
        keys = _unflatten_side(sides[:step], numbers[:size])
        values = _unflatten_side(sides[step:], numbers[size:])
        compressed.append(CompressedPart(keys, values, length, mask))
    return dense, compressed


def run_kernel(
    query: torch.Tensor, dense: Sequence[DensePart], compressed: Sequence[CompressedPart], scale: float, kernel: str
) -> torch.Tensor:
    """What the operator does, given parts."""
    # Imported late, as each needs a package that may not be there
    if kernel == "triton":
        from .triton_attention import attend as attend_with_triton

        return attend_with_triton(query, dense, compressed, scale)
    from .compiled import attend as attend_compiled

    return attend_compiled(query, dense, compressed, scale)


@torch.library.custom_op("kvcache_plugins::decode_attention", mutates_args=())
def decode_attention(
    query: torch.Tensor,
    states: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor | None],
    masks: Sequence[torch.Tensor | None],
    layout: Sequence[int],
    scale: float,
    kernel: str,
) -> torch.Tensor:
    """
    Attention of a few queries over dense and compressed parts.

    Args:
        query (`torch.Tensor` of shape `[B, H * G, Q, D]`): queries.
        states, tensors, masks, layout: what `flatten_parts` returned.
        scale (`float`): factor of the scores.
        kernel (`str`): `"compiled"` or `"triton"`.

    Returns:
        `torch.Tensor` of shape `[B, H * G, Q, value head dim]` in the queries' dtype.
    """
    return run_kernel(query, *_unflatten_parts(states, tensors, masks, layout), scale, kernel)


@decode_attention.register_fake
def _fake(
    query: torch.Tensor,
    states: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor | None],
    masks: Sequence[torch.Tensor | None],
    layout: Sequence[int],
    scale: float,
    kernel: str,
) -> torch.Tensor:
    return query.new_empty(*query.shape[:3], layout[2 * len(_SIDE_LAYOUT)])
