"""The tables of a layer as tensors of a file, and back: what the options ask for, with every number in its range.

Compiled code reads rows by the widths of a table and channels by its order, and does not look whether they lead out of
what is there.

Legend: B batch, H heads, D head dim, N blocks of eight channels, F pairs of channels that are rotated.
"""

import torch

from kvcache_plugins.files.document import Document
from kvcache_plugins.files.stored_tensors import StoredTensors
from kvcache_plugins.ops.transform_coding.allocation import num_blocks
from kvcache_plugins.ops.transform_coding.parts import RowCoder
from kvcache_plugins.ops.transform_coding.rotary import RotaryLayout
from kvcache_plugins.ops.transform_coding.rows import RowTable, order_dtype
from kvcache_plugins.ops.transform_coding.statistics import QueryMoments

from .config import TransformConfig


# Relative, of frequencies that another machine or release computed: a few roundings of float32
_TOLERANCE = 1e-6


def coder_tensors(coder: RowCoder) -> dict[str, torch.Tensor]:
    """The tensors of both tables, and the frequencies of the keys' layout."""
    tensors = {"frequencies": torch.tensor(coder.layout.frequencies, dtype=torch.float32)}
    for side, table in (("keys", coder.keys), ("values", coder.values)):
        tensors |= {f"{side}.{name}": tensor for name, tensor in table.named_tensors()}
    return tensors if coder.value_mean is None else tensors | {"value_mean": coder.value_mean}


def coder_to_document(coder: RowCoder) -> dict[str, object]:
    """Which channels of keys are rotated with which."""
    return {"rotary": coder.layout.name, "first_rotated": coder.layout.first}


def read_coder(
    document: Document,
    stored: StoredTensors,
    config: TransformConfig,
    sizes: dict[str, int],
    layouts: list[RotaryLayout],
) -> RowCoder:
    """
    How a layer's rows are read.

    Args:
        document (`Document`): what `coder_to_document` wrote.
        stored (`StoredTensors`): what `coder_tensors` returned.
        config (`TransformConfig`): the options of the cache.
        sizes (`dict[str, int]`): of the layer.
        layouts (`list[RotaryLayout]`): those that the model may have.

    Raises:
        ValueError: if it is anything that no layer of this model under these options can have.
    """
    layout = _read_layout(document, stored, layouts)
    heads = sizes["batch_size"], sizes["num_heads"]
    keys, values = sizes["key_head_dim"], sizes["value_head_dim"]
    return RowCoder(
        _read_key_table(stored.below("keys."), heads, keys, config),
        _read_value_table(stored.below("values."), heads, values, config),
        layout,
        _finite("value_mean", stored.take("value_mean", (*heads, values), torch.float16))
        if stored.has("value_mean")
        else None,
    )


def read_moments(stored: StoredTensors, sizes: dict[str, int], num_layouts: int) -> QueryMoments:
    """Sums over queries of a layer that may have so many layouts."""
    heads, head_dim = (sizes["batch_size"], sizes["num_heads"]), sizes["key_head_dim"]
    squares = _finite("squares", stored.take("squares", (*heads, head_dim), torch.float32))
    products = _finite("products", stored.take("products", (*heads, num_layouts, head_dim), torch.float32))
    if bool((squares < 0).any()):
        raise ValueError("`squares` have to be at least 0")
    return QueryMoments(squares, products)


def _read_layout(document: Document, stored: StoredTensors, layouts: list[RotaryLayout]) -> RotaryLayout:
    name, first = document.choice("rotary", sorted({each.name for each in layouts})), document.integer("first_rotated")
    document.finish()
    frequencies = stored.take("frequencies", (None,), torch.float32)
    for layout in layouts:
        own = torch.tensor(layout.frequencies, dtype=torch.float32)
        if (layout.name, layout.first, own.shape) == (name, first, frequencies.shape) and torch.allclose(
            frequencies, own, rtol=_TOLERANCE, atol=0.0
        ):
            return layout
    raise ValueError("its keys were coded with another rotary embedding than the model's config describes")


def _read_key_table(stored: StoredTensors, heads: tuple[int, int], head_dim: int, config: TransformConfig) -> RowTable:
    num_bytes = config.key_bytes(head_dim)
    order = stored.take("order", (*heads, head_dim), order_dtype(head_dim))
    if not bool((order.sort(dim=-1).values == torch.arange(head_dim)).all()):
        raise ValueError("`order` has to name every channel once")
    return RowTable(
        order=order,
        mean=_finite("mean", stored.take("mean", (*heads, head_dim), torch.float16)),
        deviation=_read_deviation(stored, (*heads, head_dim)),
        widths=_read_widths(stored, heads, head_dim, num_bytes, config.max_width),
        row_size=1 + num_bytes,
        head_dim=head_dim,
        is_weighted=True,
        quantizer=config.quantizer,
    )


def _read_value_table(
    stored: StoredTensors, heads: tuple[int, int], head_dim: int, config: TransformConfig
) -> RowTable:
    num_bytes = config.value_bytes(head_dim)
    return RowTable(
        order=None,
        mean=None,
        deviation=_read_deviation(stored, (*heads, 1)),
        widths=_read_widths(stored, heads, head_dim, num_bytes, config.max_width),
        row_size=1 + num_bytes,
        head_dim=head_dim,
        is_weighted=False,
        quantizer=config.quantizer,
    )


def _read_deviation(stored: StoredTensors, shape: tuple[int, ...]) -> torch.Tensor:
    deviation = _finite("deviation", stored.take("deviation", shape, torch.float16))
    if bool((deviation < 0).any()):
        raise ValueError("`deviation` has to be at least 0")
    return deviation


def _read_widths(
    stored: StoredTensors, heads: tuple[int, int], head_dim: int, num_bytes: int, max_width: int
) -> torch.Tensor:
    widths = stored.take("widths", (*heads, num_blocks(head_dim)), torch.uint8)
    if bool((widths > max_width).any()) or bool((widths.sum(dim=-1) != num_bytes).any()):
        raise ValueError(f"`widths` have to be at most {max_width}, and {num_bytes} together in every head")
    return widths


def _finite(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"`{name}` has to be finite")
    return tensor
