"""Compilation of kernels before the first token, by running a similar layer through a short sequence.

Triton compiles a kernel when it first runs: some kernels during the prompt, others with the first full chunk of
decoded tokens, which would interrupt decoding for seconds. A run is sure to compile all of them.
"""

from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from transformers import PreTrainedConfig

from kvcache_plugins.kernels.engine import compiles_kernels
from kvcache_plugins.layers.group_layer import GroupLayer
from kvcache_plugins.layers.layer_factory import attention_class, key_value_heads
from kvcache_plugins.layers.lazy_layer import LazyLayer
from kvcache_plugins.layers.row_layer import RowLayer
from kvcache_plugins.models.layer_config import configs_of_layers, decoder_config, head_dims


# Kinds of layers whose kernels this process has compiled
_KNOWN_KINDS: set[Hashable] = set()


class Sizes(NamedTuple):
    """Sizes of a layer's states and queries. `is_padded` is true if sequences may be padded."""

    num_heads: int
    num_query_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    is_padded: bool


def sizes_of(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, *, is_padded: bool) -> list[Sizes]:
    """List the sizes of a model's layers; none if its config does not have heads of attention."""
    config = decoder_config(config)
    query_heads = {layer_config.num_attention_heads for layer_config in configs_of_layers(config)}
    return [
        Sizes(num_heads, num_query_heads, head_dim, head_dim, dtype, device, is_padded)
        for num_query_heads in sorted(query_heads)
        for num_heads in sorted(key_value_heads(config) or {num_query_heads})
        for head_dim in sorted(head_dims(config))
        if num_query_heads % num_heads == 0
    ]


def warm_up_for_prompt(layer: LazyLayer, query: torch.Tensor) -> None:
    """Compile all kernels for decoding, before the first prompt of a layer is packed."""
    if not compiles_kernels(query):
        return
    _, num_heads, _, key_dim = layer.states_shape("keys")
    sizes = Sizes(
        num_heads=num_heads,
        num_query_heads=query.shape[1],
        key_dim=key_dim,
        value_dim=layer.states_shape("values")[3],
        dtype=layer.dtype,
        device=layer.device,
        is_padded=layer.padding is not None,
    )
    warm_up([layer], sizes)


def warm_up(layers: Iterable[object], sizes: Sizes) -> None:
    """Compile the kernels of `layers` for states of some sizes, once a process."""
    shapes = [(sizes.num_heads, sizes.key_dim), (sizes.num_heads, sizes.value_dim)]
    for layer in layers:
        if not isinstance(layer, RowLayer | GroupLayer):
            continue
        policy = layer.policy
        shared = layer.policy.shared_codec if isinstance(layer, RowLayer) else None
        # A layer itself would keep its calibration in memory
        kind = policy if shared is None else shared.kernel_kind
        layer_class = attention_class(layer)
        key = layer_class, kind, policy.residual_length, policy.num_sink_tokens, sizes
        if key in _KNOWN_KINDS or getattr(shared, "head_shapes", shapes) != shapes:
            continue
        _KNOWN_KINDS.add(key)
        # One more than the least, as padded sequences have a token of padding
        lengths = {policy.least_tokens + policy.residual_length + 1}
        if isinstance(layer, GroupLayer):
            # Sinks may be within the first group, which is then masked in part, or before it
            group = policy.least_tokens
            lengths = {2 * group, 2 * group + policy.num_sink_tokens % group}
        make_layer: Callable[..., RowLayer | GroupLayer] = layer_class
        for length in sorted(lengths):
            exercise(make_layer(policy, 0), sizes, length)


def exercise(layer: RowLayer | GroupLayer, sizes: Sizes, prompt_length: int) -> None:
    """Run an empty layer through a prompt, decoded tokens that are packed, and attention over all tokens."""
    batch_size = 2 if sizes.is_padded else 1

    def states(count: int, dim: int, num_heads: int = sizes.num_heads) -> torch.Tensor:
        # Random numbers would change the state of the user's generator
        numbers = torch.linspace(-1, 1, batch_size * num_heads * count * dim, dtype=torch.float32, device=sizes.device)
        return (numbers * 1000).cos().view(batch_size, num_heads, count, dim).to(sizes.dtype)

    # The first decoded token finds no recent rows. All others come in one update, and the next update packs them
    for count in (prompt_length, 1, max(layer.policy.residual_length - 1, 1), 1, 1):
        first = layer.get_seq_length()
        keys, values = layer.update(states(count, sizes.key_dim), states(count, sizes.value_dim))
        query = states(count, sizes.key_dim, sizes.num_query_heads)
        mask = None
        if sizes.is_padded:
            mask = torch.ones(batch_size, 1, count, first + count, dtype=torch.bool, device=sizes.device).tril(first)
            mask[0, :, :, :1] = False
        if count == 1 or not first:
            is_causal = mask is None and not first
            F.scaled_dot_product_attention(query, keys, values, mask, is_causal=is_causal, enable_gqa=True)
