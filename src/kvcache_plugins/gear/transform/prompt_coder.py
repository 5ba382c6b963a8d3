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

from .config import TransformConfig


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
