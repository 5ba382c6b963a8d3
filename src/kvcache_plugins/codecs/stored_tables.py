"""The tables of a codec as tensors of a file, and back: what the options ask for, with every number in its range.

Compiled code reads rows by the widths of a table and channels by its order, and does not look whether they lead out of
what is there.

Legend: B batch, H heads, D head dim, N blocks of eight channels, F pairs of channels that are rotated.
"""

import torch

from kvcache_plugins.files.document import Document
from kvcache_plugins.files.stored_tensors import StoredTensors

from .allocation import num_blocks
from .quantizers import QUANTIZERS
from .rope import RotaryLayout
from .rows import RowCodec, RowTable, order_dtype
from .statistics import QueryMoments


# Relative, of frequencies that another machine or release computed: a few roundings of float32
_TOLERANCE = 1e-6


def codec_tensors(codec: RowCodec) -> dict[str, torch.Tensor]:
    """Names the tensors of both tables, and the frequencies of the keys' layout."""
    tensors = {"frequencies": torch.tensor(codec.rope.frequencies, dtype=torch.float32)}
    for side, table in zip(("keys", "values"), codec.tables(), strict=True):
        tensors |= {f"{side}.{name}": tensor for name, tensor in table.named_tensors()}
    return tensors


def codec_to_document(codec: RowCodec) -> dict[str, object]:
    """Says which channels of keys are rotated with which."""
    return {"rotary": codec.rope.name, "first_rotated": codec.rope.first}


def read_codec(
    document: Document,
    stored: StoredTensors,
    heads: tuple[int, int],
    head_dims: tuple[int, int],
    sizes: tuple[int, int],
    layouts: list[RotaryLayout],
    quantizer: str,
) -> RowCodec:
    """
    Reads how a layer's rows are coded.

    Args:
        document (`Document`): what `codec_to_document` wrote.
        stored (`StoredTensors`): what `codec_tensors` returned.
        heads (two `int`): B and H.
        head_dims, sizes (two `int`): channels, and bytes of codes, of a key and of a value.
        layouts (`list[RotaryLayout]`): those that the model may have.
        quantizer (`str`): one of `QUANTIZERS`.

    Raises:
        ValueError: if it is anything that no layer of this model under these options can have.
    """
    layout = _read_layout(document, stored, layouts)
    keys, values = (
        _read_table(stored.below(f"{side}."), heads, dim, size, quantizer, layout if side == "keys" else None)
        for side, dim, size in zip(("keys", "values"), head_dims, sizes, strict=True)
    )
    return RowCodec((keys, values))


def read_moments(stored: StoredTensors, heads: tuple[int, int], head_dim: int, num_layouts: int) -> QueryMoments:
    """Reads sums over queries of a layer that may have so many layouts."""
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


def _read_table(
    stored: StoredTensors,
    heads: tuple[int, int],
    head_dim: int,
    size: int,
    quantizer: str,
    layout: RotaryLayout | None,
) -> RowTable:
    """Reads the table of keys of a layout, or of values."""
    shape, is_of_keys, order = (*heads, head_dim), layout is not None, None
    if is_of_keys:
        order = stored.take("order", shape, order_dtype(head_dim))
        if not bool((order.sort(dim=-1).values == torch.arange(head_dim)).all()):
            raise ValueError("`order` has to name every channel once")
    has_mean = is_of_keys or stored.has("mean")
    deviation = _finite("deviation", stored.take("deviation", shape if is_of_keys else (*heads, 1), torch.float16))
    if bool((deviation < 0).any()):
        raise ValueError("`deviation` has to be at least 0")
    widths = stored.take("widths", (*heads, num_blocks(head_dim)), torch.uint8)
    most = len(QUANTIZERS[quantizer].distortions) - 1
    if bool((widths > most).any()) or bool((widths.sum(dim=-1) != size).any()):
        raise ValueError(f"`widths` have to be at most {most}, and {size} together in every head")
    return RowTable(
        order=order,
        mean=_finite("mean", stored.take("mean", shape, torch.float16)) if has_mean else None,
        deviation=deviation,
        widths=widths,
        row_size=1 + size,
        head_dim=head_dim,
        is_weighted=is_of_keys,
        rope=layout,
        is_rotated=not is_of_keys,
        quantizer=quantizer,
    )


def _finite(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"`{name}` has to be finite")
    return tensor
