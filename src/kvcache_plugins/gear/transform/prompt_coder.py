"""How a prompt's own tokens say that they, and those that follow, are coded."""

from collections.abc import Sequence

import torch

from kvcache_plugins.ops.rotation import rotate
from kvcache_plugins.ops.transform_coding.parts import RowCoder
from kvcache_plugins.ops.transform_coding.rotary import RotaryLayout
from kvcache_plugins.ops.transform_coding.statistics import (
    Angles,
    QueryMoments,
    key_table_of_layout,
    make_key_table,
    make_value_table,
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
    value_table = make_value_table(rotate(values), valid, size, config.quantizer)
    return RowCoder(key_table, value_table, layouts[number])


def replace_item(
    coder: RowCoder,
    item: int,
    config: TransformConfig,
    layouts: Sequence[RotaryLayout],
    moments: QueryMoments | None,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Puts an item's tables of all its tokens `[1, H, T, D]` into their place in a coder."""
    count, layout = keys.shape[2], coder.layout
    valid = (torch.arange(count, device=keys.device) >= config.num_sink_tokens)[None]
    own = None if moments is None else moments.map(lambda sums: sums[item, None])
    number, angles = layouts.index(layout), Angles.at(layout, 0, count, None, keys.device)
    size = config.key_bytes(keys.shape[3])
    key_table, _ = key_table_of_layout(keys.float(), valid, own, number, layout, angles, size, config.quantizer)
    coder.keys.set_item(item, key_table)
    size = config.value_bytes(values.shape[3])
    coder.values.set_item(item, make_value_table(rotate(values), valid, size, config.quantizer))
