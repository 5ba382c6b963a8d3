"""The tables of a layer's own `RowCodec` as its state has them, and a codec of such tables.

Compiled code reads rows by the widths of a table and channels by its order, and does not look whether they lead out of
what is there: so they are looked at here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch

from kvcache_plugins.files.schema import Stored, check_layout

from .allocation import num_blocks
from .quantizers import QUANTIZERS
from .rope import RotaryLayout
from .rows import RowCodec, RowTable, order_dtype


# Relative, of frequencies that another machine or release computed: a few roundings of float32
_TOLERANCE = 1e-6


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class TablesState:
    """
    The tables of a `RowCodec`.

    Attributes:
        rotary (`str`), first_rotated (`int`): name and first channel of the keys' rotary embedding.
        frequencies (`torch.Tensor` of shape `[pairs]`, float32): its radians a token.
        keys, values (`dict[str, torch.Tensor]`): the tensors of `RowTable` by name.
    """

    rotary: str
    first_rotated: int
    frequencies: Annotated[torch.Tensor, Stored((None,), torch.float32)]
    keys: dict[str, torch.Tensor]
    values: dict[str, torch.Tensor]

    @classmethod
    def of(cls, codec: RowCodec) -> "TablesState":
        """Takes the tables of a codec, of which nothing is copied."""
        keys, values = codec.tables()
        frequencies = torch.tensor(codec.rope.frequencies, dtype=torch.float32)
        return cls(
            rotary=codec.rope.name,
            first_rotated=codec.rope.first,
            frequencies=frequencies,
            keys=dict(keys.named_tensors()),
            values=dict(values.named_tensors()),
        )

    def codec(
        self,
        path: str,
        heads: tuple[int, int],
        head_dims: tuple[int, int],
        sizes: tuple[int, int],
        layouts: Sequence[RotaryLayout],
        quantizer: str,
    ) -> RowCodec:
        """
        Makes the codec.

        Args:
            path (`str`): where a file has the tables, named in errors.
            heads (two `int`): sequences and heads.
            head_dims, sizes (two `int`): channels, and bytes of codes, of a key and of a value.
            layouts (`Sequence[RotaryLayout]`): those that the model may have.
            quantizer (`str`): one of `QUANTIZERS`.

        Raises:
            ValueError: if the tables are anything that no layer of this model under these options can have.
        """
        rope = self._layout(path, layouts)
        keys = _table(f"{path}.keys", self.keys, heads, head_dims[0], sizes[0], quantizer, rope)
        return RowCodec((keys, _table(f"{path}.values", self.values, heads, head_dims[1], sizes[1], quantizer, None)))

    def _layout(self, path: str, layouts: Sequence[RotaryLayout]) -> RotaryLayout:
        for layout in layouts:
            own = torch.tensor(layout.frequencies, dtype=torch.float32)
            known = self.rotary, self.first_rotated, self.frequencies.shape
            if (layout.name, layout.first, own.shape) == known and torch.allclose(
                self.frequencies, own, rtol=_TOLERANCE, atol=0.0
            ):
                return layout
        raise ValueError(f"`{path}`: keys were coded with another rotary embedding than the model's config describes")


def _table(
    path: str,
    tensors: dict[str, torch.Tensor],
    heads: tuple[int, int],
    head_dim: int,
    size: int,
    quantizer: str,
    rope: RotaryLayout | None,
) -> RowTable:
    """Makes the table of keys of a rotary embedding, or of values, whose codes take `size` bytes."""
    shape, is_of_keys, most = (*heads, head_dim), rope is not None, len(QUANTIZERS[quantizer].distortions) - 1
    layout = {
        "deviation": Stored(shape if is_of_keys else (*heads, 1), torch.float16, least=0),
        "widths": Stored((*heads, num_blocks(head_dim)), torch.uint8, most=most),
    }
    if is_of_keys:
        layout["order"] = Stored(shape, order_dtype(head_dim))
    if is_of_keys or "mean" in tensors:
        layout["mean"] = Stored(shape, torch.float16)
    check_layout(path, tensors, layout)
    order, widths = tensors.get("order"), tensors["widths"]
    if order is not None and not bool((order.sort(dim=-1).values == torch.arange(head_dim)).all()):
        raise ValueError(f"`{path}.order` has to name every channel once")
    if bool((widths.sum(dim=-1) != size).any()):
        raise ValueError(f"`{path}.widths` have to be {size} together in every head")
    return RowTable(
        order=order,
        mean=tensors.get("mean"),
        deviation=tensors["deviation"],
        widths=widths,
        row_size=1 + size,
        head_dim=head_dim,
        is_weighted=is_of_keys,
        rope=rope,
        is_rotated=not is_of_keys,
        quantizer=quantizer,
    )
