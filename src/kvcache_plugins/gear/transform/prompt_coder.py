"""How a prompt's own tokens say that they, and those that follow, are coded."""

import dataclasses
from collections.abc import Sequence

import torch

from kvcache_plugins.codecs.rotation import rotate
from kvcache_plugins.ops.transform_coding.parts import RowCoder
from kvcache_plugins.ops.transform_coding.rotary import RotaryLayout
from kvcache_plugins.ops.transform_coding.rows import RowTable
from kvcache_plugins.ops.transform_coding.statistics import (
    Angles,
    QueryMoments,
    key_table_of_layout,
    make_key_table,
    make_value_table,
    steady_mean,
)
from kvcache_plugins.ops.transform_coding.turning import turn

from .config import TransformConfig


# Tokens that say which errors are shared, and how much of their energy has to be
_NUM_NEWEST, _LEAST_SHARED = 256, 1 / 8
_LARGEST = torch.finfo(torch.float16).max


def make_prompt_coder(
    config: TransformConfig,
    layouts: Sequence[RotaryLayout],
    moments: QueryMoments | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    valid: torch.Tensor,
    first: int,
    padding: torch.Tensor | None,
) -> RowCoder:
    """Tables of tokens `[B, H, T, D]` from index `first` on, those that are `valid` `[B, T]`."""
    valid, size = valid.to(keys.device), config.key_bytes(keys.shape[3])
    key_table, number = make_key_table(keys, valid, moments, layouts, first, padding, size, config.quantizer)
    size = config.value_bytes(values.shape[3])
    value_table, mean = _make_value_side(values, valid, size, config.quantizer)
    return RowCoder(key_table, value_table, layouts[number], mean)


def _make_value_side(
    values: torch.Tensor, valid: torch.Tensor, size: int, quantizer: str
) -> tuple[RowTable, torch.Tensor | None]:
    """Makes the table of values `[B, H, T, D]`, and finds what is taken off them before."""
    mean = None if values.is_meta else steady_mean(values, valid)
    if mean is not None:
        values = values.float() - mean.float()[:, :, None]
    return make_value_table(rotate(values), valid, size, quantizer, mean), mean


def replace_item(
    coder: RowCoder,
    item: int,
    config: TransformConfig,
    layouts: Sequence[RotaryLayout],
    moments: QueryMoments | None,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> RowCoder:
    """Puts an item's tables of all its tokens `[1, H, T, D]` into their place in a coder, and returns that."""
    count, layout = keys.shape[2], coder.layout
    valid = (torch.arange(count, device=keys.device) >= config.num_sink_tokens)[None]
    own = None if moments is None else moments.map(lambda sums: sums[item, None])
    number, angles = layouts.index(layout), Angles.at(layout, 0, count, None, keys.device)
    size = config.key_bytes(keys.shape[3])
    key_table, _ = key_table_of_layout(keys.float(), valid, own, number, layout, angles, size, config.quantizer)
    coder.keys.set_item(item, key_table)
    size = config.value_bytes(values.shape[3])
    value_table, mean = _make_value_side(values, valid, size, config.quantizer)
    coder.values.set_item(item, value_table)
    if mean is None and coder.value_mean is None:
        return coder
    num_items, num_heads, head_dim = len(coder.values.widths), values.shape[1], values.shape[3]
    means = coder.value_mean
    if means is None:
        means = torch.zeros(num_items, num_heads, head_dim, dtype=torch.float16, device=values.device)
    means[item] = 0 if mean is None else mean[0]
    return dataclasses.replace(coder, value_mean=means)


def without_shared_errors(
    coder: RowCoder,
    rows: tuple[torch.Tensor, torch.Tensor],
    keys: torch.Tensor,
    values: torch.Tensor,
    valid: torch.Tensor | None,
    start: int,
    padding: torch.Tensor | None,
) -> RowCoder:
    """
    Adds to means the errors that all tokens of a prompt have in common, in heads where these are a large share of
    all errors: a prompt of few distinct tokens has few distinct errors, which attention cannot average.

    Args:
        coder (`RowCoder`): what made the rows, of tables made of these tokens.
        rows (two `torch.Tensor` of shape `[B, H, T, R]`): of keys and of values.
        keys, values (`torch.Tensor` of shape `[B, H, T, D]`): what they were made of, from index `start` on.
        valid (`torch.Tensor` of shape `[B, T]`, bool, *optional*): tokens that count, all by default.
        start, padding (`int`, `torch.Tensor` of shape `[B]`, *optional*): see `RowCoder.encode`.
    """
    tail = max(keys.shape[2] - _NUM_NEWEST, 0)
    at, newest = start + tail, slice(tail, None)
    counts = keys.new_ones(keys.shape[0], keys.shape[2], dtype=torch.float32) if valid is None else valid.float()
    share = counts[:, newest] / counts[:, newest].sum(dim=1, keepdim=True).clamp(min=1)
    exact = turn(keys[:, :, newest].float(), coder.layout, at, padding, is_back=True)
    key_error = _shared_error(exact - coder.keys.decode(rows[0][:, :, newest]), share)
    value_error = _shared_error(values[:, :, newest].float() - coder.decode_values(rows[1][:, :, newest]), share)
    mean = coder.value_mean
    if mean is not None or bool((value_error != 0).any()):
        mean = ((0 if mean is None else mean.float()) + value_error).clamp(-_LARGEST, _LARGEST).half()
    assert coder.keys.mean is not None
    key_mean = (coder.keys.mean.float() + key_error).clamp(-_LARGEST, _LARGEST).half()
    return dataclasses.replace(coder, keys=dataclasses.replace(coder.keys, mean=key_mean), value_mean=mean)


def _shared_error(errors: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """The mean `[B, H, D]` of errors `[B, H, T, D]`, 0 in heads where it is little of them."""
    mean = torch.einsum("bhtd,bt->bhd", errors, share)
    energy = torch.einsum("bhtd,bt->bh", errors.square(), share)
    return mean * (mean.square().sum(dim=2) > _LEAST_SHARED * energy)[:, :, None]
