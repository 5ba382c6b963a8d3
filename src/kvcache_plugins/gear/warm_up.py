"""Kernels compiled before the first token: a layer like the real one is taken through all that a sequence makes it do.

Triton compiles a kernel when it is first run. A prompt runs some, the first full chunk of decoded tokens
others, and a pause of seconds amid decoding is what nobody expects. Running them is the one way that cannot miss one.
Steps that are captured have kernels of their own, which read lengths on the device: they are for whoever captures.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.layers.model_match import key_value_heads
from kvcache_plugins.layers.prompt_layer import PromptLayer
from kvcache_plugins.models.layer_config import decoder_config, head_dims

from .config import GEARConfig
from .fixed_storage import FixedForm
from .step_cache import StepLayer
from .step_numbers import StepNumbers


class Sizes(NamedTuple):
    """
    Of what a layer is given.

    Args:
        num_heads, num_query_heads (`int`): heads of keys and of queries.
        key_dim, value_dim (`int`): channels of a head.
        dtype (`torch.dtype`), device (`torch.device`): of the states.
        is_padded (`bool`): whether items may be padded.
    """

    num_heads: int
    num_query_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    is_padded: bool


def sizes_of(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, *, is_padded: bool) -> list[Sizes]:
    """What the layers of a model are given; none where its states are of another form than heads."""
    config = decoder_config(config)
    num_query_heads = config.num_attention_heads
    return [
        Sizes(num_heads, num_query_heads, head_dim, head_dim, dtype, device, is_padded)
        for num_heads in sorted(key_value_heads(config) or {num_query_heads})
        for head_dim in sorted(head_dims(config))
        if num_query_heads % num_heads == 0
    ]


@functools.cache
def warm_up_gear(
    layer_class: Callable[[GEARConfig, int], PromptLayer],
    config: GEARConfig,
    sizes: Sizes,
    *,
    is_captured: bool = False,
) -> None:
    """
    Compiles what GEAR's layers, which are of `layer_class`, run with some options, once a process; with `is_captured`
    what their captured steps run too.
    """
    group, num_sinks = config.token_group, config.num_sink_tokens
    # Sinks may stand within the first group, and then parts of it are hidden, or before it
    for length in sorted({2 * group, 2 * group + num_sinks % group}):
        layer: Any = layer_class(config, 0)
        layer.is_warm = True
        exercise(layer, sizes, length, config.residual_length, is_captured=is_captured)


def exercise(layer: Any, sizes: Sizes, prompt_length: int, num_decoded: int, *, is_captured: bool = False) -> None:
    """Takes an empty layer through a prompt, decoded tokens that are compressed, and attention over all of it."""
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
        # The decoded tokens come at once, and the update after them compresses them
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
            step = StepLayer(form, numbers)
            step.update(states(1, sizes.key_dim), states(1, sizes.value_dim))
            step.attend(AttentionCall(query))
