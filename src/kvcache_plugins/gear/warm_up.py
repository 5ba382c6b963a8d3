"""Kernels compiled before the first token: a layer like the real one is taken through all that a sequence makes it do.

Triton compiles a kernel when it is first run. A prompt runs some, the first full chunk of decoded tokens
others, and a pause of seconds amid decoding is what nobody expects. Running them is the one way that cannot miss one.
Steps that are captured have kernels of their own, which read lengths on the device: they are for whoever captures.
"""

import functools
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.kernels.engine import compiles_kernels
from kvcache_plugins.layers.compressed_layer import CompressedLayer
from kvcache_plugins.layers.model_match import key_value_heads
from kvcache_plugins.layers.packing import GroupPacking
from kvcache_plugins.models.layer_config import decoder_config, head_dims

from .captured_steps import FixedForm, StepLayer, StepNumbers


class Sizes(NamedTuple):
    """
    Sizes of what a layer is given.

    Args:
        num_heads, num_query_heads (`int`): heads of keys and of queries.
        key_dim, value_dim (`int`): channels of a head.
        dtype (`torch.dtype`), device (`torch.device`): of the states.
        is_padded (`bool`): whether sequences may be padded.
    """

    num_heads: int
    num_query_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    is_padded: bool


def sizes_of(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, *, is_padded: bool) -> list[Sizes]:
    """Lists what the layers of a model are given; nothing where its states are of another form than heads."""
    config = decoder_config(config)
    num_query_heads = config.num_attention_heads
    return [
        Sizes(num_heads, num_query_heads, head_dim, head_dim, dtype, device, is_padded)
        for num_heads in sorted(key_value_heads(config) or {num_query_heads})
        for head_dim in sorted(head_dims(config))
        if num_query_heads % num_heads == 0
    ]


def warm_up_for_prompt(layer: CompressedLayer, query: torch.Tensor) -> None:
    """Compiles all that decoding will need, before the first prompt of a layer is packed."""
    if compiles_kernels(query):
        (_, heads, _, key_dim), value_dim = layer.states_shape("keys"), layer.states_shape("values")[3]
        is_padded = layer.padding is not None
        sizes = Sizes(heads, query.shape[1], key_dim, value_dim, layer.dtype, layer.device, is_padded)
        warm_up([layer], sizes)


def warm_up(layers: Iterable[object], sizes: Sizes, *, is_captured: bool = False) -> None:
    """
    Compiles what those among `layers` run whose states are of some sizes, once a process; with `is_captured` what
    their captured steps run too.
    """
    shapes = [(sizes.num_heads, sizes.key_dim), (sizes.num_heads, sizes.value_dim)]
    for layer in layers:
        if not isinstance(layer, CompressedLayer):
            continue
        packing = layer.packing
        # Layers themselves are not kept, as they may have a calibration
        kind = packing if packing.fixed is None else packing.fixed.kernel_kind
        key = kind, packing.residual_length, packing.num_sink_tokens, sizes, is_captured
        if key in _known_kinds() or getattr(packing.fixed, "head_shapes", shapes) != shapes:
            continue
        _known_kinds().add(key)
        # A token of what may be padded is padding
        lengths = {packing.least_tokens + 1}
        if isinstance(packing, GroupPacking):
            # Sinks may stand within the first group, and then parts of it are hidden, or before it
            group = packing.least_tokens
            lengths = {2 * group, 2 * group + packing.num_sink_tokens % group}
        for length in sorted(lengths):
            exercise(CompressedLayer(packing, 0), sizes, length, packing.residual_length, is_captured=is_captured)


@functools.cache
def _known_kinds() -> set[Hashable]:
    """Holds the kinds of layers that kernels have been compiled for."""
    return set()


def exercise(
    layer: CompressedLayer, sizes: Sizes, prompt_length: int, num_decoded: int, *, is_captured: bool = False
) -> None:
    """Takes an empty layer through a prompt, decoded tokens that are packed, and attention over all of it."""
    batch_size = 2 if sizes.is_padded else 1

    def states(count: int, dim: int, num_heads: int = sizes.num_heads) -> torch.Tensor:
        # No random numbers: those are the user's
        numbers = torch.linspace(-1, 1, batch_size * num_heads * count * dim, device=sizes.device)
        return (numbers * 1000).cos().view(batch_size, num_heads, count, dim).to(sizes.dtype)

    def mask(num_new: int, length: int) -> torch.Tensor | None:
        if not sizes.is_padded:
            return None
        allowed = torch.ones(batch_size, 1, num_new, length, dtype=torch.bool, device=sizes.device)
        allowed[0, :, :, :1] = False
        return allowed.tril(length - num_new)

    with torch.no_grad():
        # The decoded tokens come at once, and the update after them packs them
        for count in (prompt_length, num_decoded, 1):
            layer.update(states(count, sizes.key_dim), states(count, sizes.value_dim))
            query = states(count, sizes.key_dim, sizes.num_query_heads)
            if layer.get_seq_length() == count:
                hidden = mask(count, count)
                layer.on_exact_attention(AttentionCall(query, hidden, is_causal=hidden is None))
        layer.attend(AttentionCall(query, mask(1, layer.get_seq_length())))
        if is_captured:
            form, numbers = FixedForm(layer, 1), StepNumbers(sizes.device)
            numbers.set(form.numbers())
            step: Any = StepLayer(form, numbers)
            step.update(states(1, sizes.key_dim), states(1, sizes.value_dim))
            step.attend(AttentionCall(query))
