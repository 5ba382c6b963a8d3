"""Kernels compiled before the first token: a layer like the real one is taken through all that a sequence makes it do.

Triton compiles a kernel when it is first run. A prompt runs some, the first full chunk of decoded tokens
others, and a pause of seconds amid decoding is what nobody expects. Running them is the one way that cannot miss one.
"""

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import PreTrainedConfig

from kvcache_plugins.kernels.engine import compiles_kernels
from kvcache_plugins.layers.compressed_layer import CompressedLayer
from kvcache_plugins.layers.group_layer import GroupLayer
from kvcache_plugins.layers.layer_factory import key_value_heads
from kvcache_plugins.layers.policies import RowPolicy
from kvcache_plugins.models.layer_config import configs_of_layers, decoder_config, head_dims


# Kinds of layers that kernels have been compiled for
_KNOWN_KINDS: set[Hashable] = set()


class Sizes(NamedTuple):
    """Sizes of what a layer is given, and whether its sequences may be padded."""

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
    query_heads = {layer_config.num_attention_heads for layer_config in configs_of_layers(config)}
    return [
        Sizes(num_heads, num_query_heads, head_dim, head_dim, dtype, device, is_padded)
        for num_query_heads in sorted(query_heads)
        for num_heads in sorted(key_value_heads(config) or {num_query_heads})
        for head_dim in sorted(head_dims(config))
        if num_query_heads % num_heads == 0
    ]


def warm_up_for_prompt(layer: CompressedLayer[Any, Any], query: torch.Tensor) -> None:
    """Compiles all that decoding will need, before the first prompt of a layer is packed."""
    if compiles_kernels(query):
        (_, heads, _, key_dim), value_dim = layer.states_shape("keys"), layer.states_shape("values")[3]
        is_padded = layer.padding is not None
        sizes = Sizes(heads, query.shape[1], key_dim, value_dim, layer.dtype, layer.device, is_padded)
        warm_up([layer], sizes)


def warm_up(layers: Iterable[object], sizes: Sizes) -> None:
    """Compiles what those among `layers` run whose states are of some sizes, once a process."""
    shapes = [(sizes.num_heads, sizes.key_dim), (sizes.num_heads, sizes.value_dim)]
    for layer in layers:
        if not isinstance(layer, CompressedLayer):
            continue
        policy = layer.policy
        shared = policy.shared_codec if isinstance(policy, RowPolicy) else None
        # Layers themselves are not kept, as they may have a calibration
        kind = policy if shared is None else shared.kernel_kind
        key = type(layer), kind, policy.residual_length, policy.num_sink_tokens, sizes
        if key in _KNOWN_KINDS or getattr(shared, "head_shapes", shapes) != shapes:
            continue
        _KNOWN_KINDS.add(key)
        # A token of what may be padded is padding
        lengths = {policy.least_tokens + policy.residual_length + 1}
        if isinstance(layer, GroupLayer):
            # Sinks may stand within the first group, and then parts of it are hidden, or before it
            group = policy.least_tokens
            lengths = {2 * group, 2 * group + policy.num_sink_tokens % group}
        for length in sorted(lengths):
            exercise(type(layer)(policy, 0), sizes, length)


def exercise(layer: CompressedLayer[Any, Any], sizes: Sizes, prompt_length: int) -> None:
    """Takes an empty layer through a prompt, decoded tokens that are packed, and attention over all of it."""
    batch_size = 2 if sizes.is_padded else 1

    def states(count: int, dim: int, num_heads: int = sizes.num_heads) -> torch.Tensor:
        # No random numbers: those are the user's
        numbers = torch.linspace(-1, 1, batch_size * num_heads * count * dim, dtype=torch.float32, device=sizes.device)
        return (numbers * 1000).cos().view(batch_size, num_heads, count, dim).to(sizes.dtype)

    # The decoded tokens come at once, and the update after them packs them
    for count in (prompt_length, layer.policy.residual_length, 1, 1):
        first = layer.get_seq_length()
        keys, values = layer.update(states(count, sizes.key_dim), states(count, sizes.value_dim))
        query, hidden = states(count, sizes.key_dim, sizes.num_query_heads), None
        if sizes.is_padded:
            hidden = torch.ones(batch_size, 1, count, first + count, dtype=torch.bool, device=sizes.device).tril(first)
            hidden[0, :, :, :1] = False
        if count == 1 or not first:
            is_causal = hidden is None and not first
            F.scaled_dot_product_attention(query, keys, values, hidden, is_causal=is_causal, enable_gqa=True)
