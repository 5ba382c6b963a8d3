"""`RowCodec`: keys and values as rows of two formats, of one prompt or shared by all caches of a model."""

import dataclasses
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from kvcache_plugins.formats.parts import RowPart
from kvcache_plugins.formats.positions import Positions
from kvcache_plugins.formats.rotary import RotaryLayout
from kvcache_plugins.formats.rows import LAST_SCALE, RowFormat, RowFormats, Rows
from kvcache_plugins.kernels.ops import decode_rows, encode_rows, requantize_rows

from .codec import Codec


class SharedFormats(nn.Module):
    """
    Formats of a layer's keys and values that all caches of a model share, copied once to every device that needs them.
    It is a module, as it belongs to the model, and no cache counts it in its memory.
    """

    def __init__(self, keys: RowFormat, values: RowFormat):
        super().__init__()
        self._by_device = {keys.widths.device: (keys, values)}

    def on(self, device: torch.device | None) -> RowFormats:
        """Return the formats on a device; the original ones without a device."""
        if device is None:
            return next(iter(self._by_device.values()))
        if device not in self._by_device:
            keys, values = (each.map(lambda tensor: tensor.to(device)) for each in self.on(None))
            self._by_device[device] = keys, values
        return self._by_device[device]

    def tensors(self) -> Iterator[torch.Tensor]:
        """List the tensors of all devices that hold data."""
        for device, formats in self._by_device.items():
            if device.type != "meta":
                for each in formats:
                    yield from each.tensors()

    def __deepcopy__(self, memo: dict[int, object]) -> "SharedFormats":
        # Nothing ever changes it, and copies of a cache are to share it
        return self


@dataclass(eq=False, repr=False)
class RowCodec(Codec):
    """
    Codes keys and values by two formats: a cache's own, or a model's; without them the codec has still to be fitted.
    """

    _formats: RowFormats | SharedFormats | None
    _with_more_bits: "dict[int, RowCodec]" = field(init=False, default_factory=dict)

    has_kernels = True

    @property
    def is_shared(self) -> bool:
        """True if the formats are a model's."""
        return isinstance(self._formats, SharedFormats)

    @property
    def shared_formats(self) -> RowFormats | None:
        return self.formats() if self.is_shared else None

    def formats(self, device: torch.device | None = None) -> RowFormats:
        """Return the formats of keys and values, on a device if they are a model's."""
        assert self._formats is not None, "it has been fitted"
        return self._formats.on(device) if isinstance(self._formats, SharedFormats) else self._formats

    def with_more_bits(self, nbits: int) -> "RowCodec":
        """Return the codec of rows with `nbits` more bits a number; the same one as long as formats are the same."""
        if nbits not in self._with_more_bits:
            keys, values = (each.with_more_bits(nbits) for each in self.formats())
            self._with_more_bits[nbits] = RowCodec(SharedFormats(keys, values) if self.is_shared else (keys, values))
        return self._with_more_bits[nbits]

    @property
    def rope(self) -> RotaryLayout:
        """The rotary embedding of keys."""
        rope = self.formats()[0].rope
        assert rope is not None, "keys have a layout, be it one that rotates nothing"
        return rope

    @property
    def rotary_name(self) -> str | None:
        return self.rope.name

    @property
    def row_sizes(self) -> tuple[int, int]:
        keys, values = self.formats()
        return keys.row_size, values.row_size

    @property
    def head_shapes(self) -> list[tuple[int, int]]:
        """Heads and head dim of keys and of values."""
        return [(each.widths.shape[1], each.head_dim) for each in self.formats()]

    @property
    def kernel_kind(self) -> Hashable:
        return tuple((each.row_size, each.num_coefficients) for each in self.formats())

    def check_shapes(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        for states, (num_heads, head_dim) in zip((keys, values), self.head_shapes, strict=True):
            if states.shape[1::2] != (num_heads, head_dim):
                raise ValueError(
                    f"`calibration` is of {num_heads} heads of {head_dim}, but got {states.shape[1]} of "
                    f"{states.shape[3]}: it was made for another model"
                )

    def encode(self, keys: torch.Tensor, values: torch.Tensor, positions: Positions) -> Rows:
        key_format, value_format = self.formats(keys.device)
        return encode_rows(keys, key_format, positions), encode_rows(values, value_format, positions)

    def requantize(self, rows: Rows, nbits: int) -> Rows:
        finer = self.with_more_bits(nbits)
        formats = zip(rows, finer.formats(rows[0].device), self.formats(rows[0].device), strict=True)
        keys, values = (requantize_rows(own, finer_format, row_format) for own, finer_format, row_format in formats)
        return keys, values

    def decode_keys(self, rows: torch.Tensor, positions: Positions) -> torch.Tensor:
        return decode_rows(rows, self.formats(rows.device)[0], positions)

    def decode_values(self, rows: torch.Tensor) -> torch.Tensor:
        return decode_rows(rows, self.formats(rows.device)[1])

    def part(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        positions: Positions,
        length: int,
        mask: torch.Tensor | None,
    ) -> RowPart:
        return RowPart(keys, values, self.formats(keys.device), positions, length, mask)

    def overflow(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor | None:
        if keys.is_meta:
            return None
        return ((keys[..., 0] == LAST_SCALE) | (values[..., 0] == LAST_SCALE)).any(dim=1)

    def tensors(self) -> Iterator[torch.Tensor]:
        if self._formats is not None and not self.is_shared:
            yield from (tensor for each in self.formats() for tensor in each.tensors())
            yield from (each.widths for codec in self._with_more_bits.values() for each in codec.formats())

    def shared_tensors(self) -> Iterator[torch.Tensor]:
        if isinstance(self._formats, SharedFormats):
            yield from self._formats.tensors()

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "RowCodec":
        if not isinstance(self._formats, tuple):
            return self
        keys, values = self._formats
        return dataclasses.replace(self, _formats=(keys.map(function), values.map(function)))


def share_formats(codec: Codec | None) -> RowCodec | None:
    """Return a codec of rows, fitted to one sequence, for all sequences of a model; `None` for any other codec."""
    if not isinstance(codec, RowCodec):
        return None
    return codec if codec.is_shared else RowCodec(SharedFormats(*codec.formats()))
