"""Latent attention (MLA) over latent states as they are stored, `[B, 1, T, rank]`, beside rotary keys `[B, 1, T, R]`.

Models of DeepSeek's form cache one latent state a token as keys, and one rotary key for all heads as values. A linear
layer `[H * E, rank]` expands latent states to `E` channels of each head, first the key's and then the value's; the
rotary key is copied behind the key of each head:

    keys[h] = [ key rows of weight[h] @ latent, rotary ]        values[h] = value rows of weight[h] @ latent

The steps below follow this expansion. Attention to its results multiplies queries with the key rows instead, attends
to latent states with all heads, and multiplies the output with the value rows: nothing is expanded for each token.
If there are so many queries that expanding costs less, one tile of tokens is expanded after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch

from kvcache_plugins.kernels.attention_call import AttentionCall

from .attention_steps import Function, LazyTensor, Stored, functions, is_dense, transpose_keys
from .torch_contexts import in_caller_context


@dataclass(frozen=True, eq=False, slots=True)
class Expanded:
    """
    Channels of all heads that are expanded from latent states.

    Attributes:
        weight (`torch.Tensor` of shape `[H * E, rank]`): the weight of the linear layer.
        layout (`str`): `"flat"` `[B, 1, T, H * E]`, `"by token"` `[B, T, H, E]` or `"by head"` `[B, H, T, channels]`.
        channels (`tuple[int, int]`): first and last channel, exclusive, of a head's `E`.
    """

    is_kept: ClassVar[bool] = False
    weight: torch.Tensor
    layout: Literal["flat", "by token", "by head"] = "flat"
    channels: tuple[int, int] = (0, 0)


@dataclass(frozen=True, eq=False, slots=True)
class Joined:
    """Keys `[B, H, T, D]` that are copied together: first and last channel of each part, exclusive, and the part."""

    is_kept: ClassVar[bool] = True
    parts: tuple[tuple[int, int, LazyTensor], ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class Channels:
    """Channels of joined keys, which a part is copied into."""

    is_kept: ClassVar[bool] = True
    whole: LazyTensor
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """
    Attention to latent states.

    Attributes:
        weight (`torch.Tensor` of shape `[H, E, rank]`): expands latent states to each head's key and value.
        key_size (`int`): channels of `E` that are the key's.
    """

    weight: torch.Tensor
    key_size: int

    @staticmethod
    def find(keys: LazyTensor, values: LazyTensor) -> LatentAttention | None:
        """Return the attention whose keys and values these are; `None` if they are not of latent attention."""
        whole, expanded = keys.meaning, values.meaning
        if not isinstance(whole, Joined) or not isinstance(expanded, Expanded) or len(whole.parts) != 2:
            return None
        (start, stop, own), (_, end, rotary) = sorted(whole.parts, key=lambda part: part[0])
        num_heads, size = keys.shape[1], keys.shape[3]
        is_whole = (start, end) == (0, size) and stop == own.shape[3] == size - rotary.shape[3]
        is_rotary = isinstance(rotary.meaning, Stored) and rotary.meaning.num_repeats == num_heads
        if not is_whole or not is_rotary or rotary.meaning.side != "values" or expanded.layout != "by head":
            return None
        if not isinstance(own.meaning, Expanded) or own.meaning.weight is not expanded.weight:
            return None
        weight = expanded.weight.unflatten(0, (num_heads, -1))
        if own.meaning.channels != (0, stop) or expanded.channels != (stop, weight.shape[1]):
            return None
        return LatentAttention(weight, stop)

    def expand(self, tile: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Make keys and values of all heads for some tokens' stored `"keys"` and `"values"`."""
        latent, rotary = tile["keys"], tile["values"]
        channels = latent @ self.weight.transpose(1, 2)  # [B, H, T, E]
        keys, values = channels.tensor_split([self.key_size], dim=3)
        return torch.cat([keys, rotary.expand(-1, keys.shape[1], -1, -1)], dim=3), values

    def expands(self, call: AttentionCall) -> bool:
        """Return True if expanding every token costs less than attention to latent states: for many queries."""
        size, rank = self.weight.shape[1:]
        return call.query.shape[2] * (2 * rank - size) > size * rank

    def attend(self, layer: Any, call: AttentionCall) -> torch.Tensor:
        """Have `layer` answer a call over the keys and values that it would expand to."""
        if self.expands(call):
            output: torch.Tensor = layer.attend_projected(replace(call, project=self.expand))
            return output
        key_weight, value_weight = self.weight.tensor_split([self.key_size], dim=1)
        query, rotary_query = call.query.tensor_split([self.key_size], dim=3)
        scale = call.query.shape[3] ** -0.5 if call.scale is None else call.scale
        absorbed = torch.cat([query @ key_weight, rotary_query], dim=3)  # [B, H, Q, rank + R]
        output = layer.attend_projected(replace(call, query=absorbed, scale=scale, project=_join_latent))
        return output @ value_weight.transpose(1, 2)


def _join_latent(tile: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([tile["keys"], tile["values"]], dim=3), tile["keys"]


# Steps, see `attention_steps`


def _project(latent: LazyTensor, weight: object, bias: object = None) -> LazyTensor | None:
    is_latent = latent.meaning.side == "keys" and latent.meaning.num_repeats == 1 and latent.shape[1] == 1
    if not is_latent or len(latent.shape) != 4 or bias is not None or not isinstance(weight, torch.Tensor):
        return None
    # Under `torch.autocast` the result has another dtype
    if not is_dense(weight) or weight.dtype != latent.dtype or in_caller_context():
        return None
    return latent.derive(Expanded(weight.detach()), (*latent.shape[:3], weight.shape[0]))


def _split_heads(states: LazyTensor, *sizes: Any) -> LazyTensor | None:
    """View flat channels by token and head."""
    batch_size, _, num_tokens, num_channels = states.shape
    sizes = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else sizes
    if states.meaning.layout != "flat" or len(sizes) != 4 or sizes[3] <= 0 or num_channels % sizes[3]:
        return None
    shape = batch_size, num_tokens, num_channels // sizes[3], sizes[3]
    if sizes != shape and sizes != (*shape[:2], -1, shape[3]):
        return None
    return states.derive(replace(states.meaning, layout="by token", channels=(0, sizes[3])), shape)


def _swap(states: LazyTensor, first: int, second: int) -> LazyTensor | None:
    """Put heads before tokens."""
    if states.meaning.layout != "by token" or {first, second} != {1, 2}:
        return None
    shape = states.shape
    return states.derive(replace(states.meaning, layout="by head"), (shape[0], shape[2], shape[1], shape[3]))


def _split_channels(states: LazyTensor, sizes: object, dim: object = 0) -> tuple[LazyTensor, ...] | None:
    if states.meaning.layout != "by head" or dim not in (-1, 3) or not isinstance(sizes, list | tuple):
        return None
    start, made = states.meaning.channels[0], []
    for size in sizes:
        meaning = replace(states.meaning, channels=(start, start + size))
        made.append(states.derive(meaning, (*states.shape[:3], size)))
        start += size
    return tuple(made)


def _allocate(states: LazyTensor, *sizes: Any) -> LazyTensor | None:
    """Make keys that parts are then copied into."""
    if states.meaning.layout != "by head" or len(sizes) != 4 or sizes[:3] != tuple(states.shape[:3]):
        return None
    return states.derive(Joined(), sizes)


def _take_channels(keys: LazyTensor, index: object) -> LazyTensor | None:
    if not isinstance(index, tuple) or len(index) != 2 or index[0] is not ... or not isinstance(index[1], slice):
        return None
    start, stop, step = index[1].indices(keys.shape[3])
    return keys.derive(Channels(keys, start, stop), (*keys.shape[:3], stop - start)) if step == 1 else None


def _copy(channels: LazyTensor, part: Any) -> LazyTensor | None:
    """Record a part of joined keys that are not dense yet."""
    meaning = getattr(part, "meaning", None)
    whole = channels.meaning.whole
    start, stop = channels.meaning.start, channels.meaning.stop
    if not isinstance(meaning, Expanded | Stored) or part.shape != channels.shape or part.dtype != channels.dtype:
        return None
    if whole.numbers is not None:
        return None
    whole.meaning = Joined((*whole.meaning.parts, (start, stop, part)))
    whole.recipe = _copy_together, (whole.shape, whole.dtype, whole.source.layer.device, whole.meaning.parts), {}
    return channels


def _copy_together(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    parts: Sequence[tuple[int, int, torch.Tensor]],
) -> torch.Tensor:
    made = torch.empty(shape, dtype=dtype, device=device)
    for start, stop, part in parts:
        made[..., start:stop].copy_(part)
    return made


LATENT_STEPS: dict[tuple[Function, type], Function] = {
    (function, meaning): step
    for meaning, step, found in (
        (Stored, _project, functions("linear")),
        (Expanded, _split_heads, functions("view")),
        (Expanded, _swap, functions("transpose")),
        (Expanded, _split_channels, functions("split")),
        (Expanded, _allocate, functions("new_empty")),
        (Joined, transpose_keys, functions("transpose")),
        (Joined, _take_channels, functions("__getitem__")),
        (Channels, _copy, functions("copy_")),
    )
    for function in found
}
