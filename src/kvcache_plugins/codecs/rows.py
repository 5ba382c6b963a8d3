"""Tokens of keys or values coded one by one by tables, and decoded: the reference in plain PyTorch, and which kernel
computes instead.

    token -> before its rotary embedding (keys) -> less a mean -> rotated, or in the basis of its head
          -> channels in the order of the table, over a standard deviation
          -> over the token's own scale: 8 bits, log2 in steps of 1/16
          -> codes, of as many bits as the block of eight channels has: `[scale | block | block | ...]`

Everything but the scale is the head's, in a `RowTable`: of a prompt, or of a calibration, which has bases. The scale
that is stored is found after the codes: for keys the one of least error where every channel counts by its energy,
which goes with `4^width`; for values `z.z / z.q`, which leaves them as large as they were: what attention sums up must
not shrink with every token.

Legend: B batch, H heads, T tokens, D channels, K numbers that are coded, N blocks of eight, R bytes of a row.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from kvcache_plugins.codecs.rotation import rotate
from kvcache_plugins.kernels.engine import choose_coding_kernel
from kvcache_plugins.triton_kernels.stored_format import LAST_SCALE, LEAST_GAIN, SCALE_OFFSET, SCALE_STEPS, RowLayout

from .basis import Basis
from .codec import START, Codec, Positions, Rows
from .quantizer import BLOCK, MAX_WIDTH, find_codes, pack_rows, point_gains, points_of, unpack_rows
from .rope import RotaryLayout, apply_rope


# Numbers that are coded or decoded at a time: as a CPU's caches hold, and as take a GPU longer than its host to launch
_NUMBERS_ON_CPU, _NUMBERS_ON_GPU = 2**18, 2**23
# Of Triton's kernels: more channels would not fit into registers
_MOST_TRITON_CHANNELS = 256
_TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Times that a key's scale and codes are fitted to each other in the basis of a calibration, at most
_NUM_REFITS = 5


@dataclass(frozen=True, eq=False)
class RowTable(RowLayout):
    """
    How the tokens of one side are coded. Tables of a calibration are those of every sequence.

    Attributes:
        basis (`Basis`, *optional*): in which they are coded.
        rope (`RotaryLayout`, *optional*): the rotary embedding that is undone first.
        is_rotated (`bool`, *optional*, defaults to `False`): whether a Hadamard matrix rotates them, see
            `codecs.rotation`.
        by_energy (`bool`): whether channels count by their energy in a scale that shrinks nothing, too.
    """

    basis: Basis | None = None
    rope: RotaryLayout | None = None
    is_rotated: bool = False
    by_energy: bool = False

    @classmethod
    def in_basis(cls, mean: torch.Tensor, basis: Basis, widths: torch.Tensor, rope: RotaryLayout | None) -> "RowTable":
        """
        Makes a table of a calibration: of a mean `[H, D]`, float16, what `Basis.for_widths` returns, and the rotary
        embedding of keys, which values do not have.
        """
        is_of_keys = rope is not None
        return cls(
            order=None,
            mean=mean[None].contiguous(),
            deviation=None,
            widths=widths[None],
            row_size=1 + int(widths[0].sum()),
            head_dim=mean.shape[1],
            is_weighted=is_of_keys,
            rope=rope,
            basis=basis,
            by_energy=not is_of_keys,
            num_refits=_NUM_REFITS if is_of_keys else 0,
        )

    def finer(self, nbits: int) -> "RowTable":
        """Returns the table of rows with `nbits` more bits a number, or as many as there are codes of."""
        widths = (self.widths + nbits).clamp(max=MAX_WIDTH)
        # Known without asking a device: rows of heads that have the most bits already end with zeros
        return dataclasses.replace(self, widths=widths, row_size=self.row_size + nbits * widths.shape[2])

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Lists everything stored but the basis."""
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                yield name, value

    def tensors(self) -> Iterator[torch.Tensor]:
        """Lists everything stored."""
        yield from (tensor for _, tensor in self.named_tensors())
        if self.basis is not None:
            yield from self.basis.tensors()

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "RowTable":
        """Returns the table with `function` applied to every tensor."""
        changes: dict[str, Any] = {name: function(tensor) for name, tensor in self.named_tensors()}
        if self.basis is not None:
            changes["basis"] = self.basis.map(function)
        return dataclasses.replace(self, **changes)

    def with_sequence(self, number: int, table: "RowTable") -> "RowTable":
        """Puts the table of one sequence into the place of another's, and returns all."""
        own, changed = dict(table.named_tensors()), self
        if self.mean is None and table.mean is not None:
            shape = len(self.widths), *table.mean.shape[1:]
            changed = dataclasses.replace(self, mean=table.mean.new_zeros(shape))
        for name, tensor in changed.named_tensors():
            tensor[number] = own[name][0] if name in own else 0
        return changed

    def encode(self, states: torch.Tensor, positions: Positions = START) -> torch.Tensor:
        """Codes states `[B, H, T, D]` of any floating dtype as rows `[B, H, T, R]`, uint8."""
        if states.is_meta:
            return states.new_empty(*states.shape[:3], self.row_size, dtype=torch.uint8)
        kernel = choose_coding_kernel(states, self.head_dim)
        # Kernels are imported late: they import this module, and need packages that may not be there
        if kernel == "compiled":
            from kvcache_plugins.kernels import cpu_coding

            return cpu_coding.encode_rows(states, self, positions)
        if self.is_rotated and self.mean is not None:
            states = states.float() - self.mean.float()[:, :, None]
        if kernel == "triton" and self.has_triton(states):
            from kvcache_plugins.kernels.triton import encode

            return encode(states, self, positions)
        parts = self._split(self._transform(states, positions))
        return torch.cat([self._encode(part) for part in parts], dim=2)

    def recode(self, rows: torch.Tensor, finer: "RowTable") -> torch.Tensor:
        """Codes rows `[B, H, T, R]` of a table that this has made by `finer` as its own, in their basis."""
        if rows.is_meta:
            return rows.new_empty(*rows.shape[:3], self.row_size)
        if choose_coding_kernel(rows, self.head_dim) == "compiled":
            from kvcache_plugins.kernels import cpu_coding

            return cpu_coding.requantize_rows(rows, finer, self)
        return torch.cat([self._encode(finer._decode(part)) for part in self._split(rows)], dim=2)

    def decode(self, rows: torch.Tensor, positions: Positions | None = START) -> torch.Tensor:
        """Decodes rows `[B, H, T, R]` to states `[B, H, T, D]`, float32; keys before RoPE if positions are `None`."""
        if rows.is_meta:
            return rows.new_empty(*rows.shape[:3], self.head_dim, dtype=torch.float32)
        if choose_coding_kernel(rows, self.head_dim) == "compiled":
            from kvcache_plugins.kernels import cpu_coding

            return cpu_coding.decode_rows(rows, self, positions)
        states = torch.cat([self._decode(part) for part in self._split(rows)], dim=2)
        states = rotate(states) if self.is_rotated else states
        if self.basis is not None:
            states = self.basis.states(states)
        if self.mean is not None:
            states = states + self.mean.float()[:, :, None]
        return states if self.rope is None or positions is None else apply_rope(states, self.rope, positions)

    def combine(self, sums: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """
        Returns sums of states `[B, H, ..., D]`, not to be rotated any more, given those of numbers in the basis or
        without the mean `[B, H, ..., K]`, each times its token's weight, and sums of weights `[B, H, ...]`.
        """
        states = sums.flatten(2, -2)
        if self.basis is not None:
            states = self.basis.states(states)
        if self.mean is not None:
            states = states + weights.flatten(2)[..., None] * self.mean.float()[:, :, None]
        return states.reshape(*sums.shape[:-1], self.head_dim)

    def has_triton(self, states: torch.Tensor) -> bool:
        """Tells whether states are coded by Triton's kernels, where these are chosen."""
        return self.head_dim <= _MOST_TRITON_CHANNELS and states.dtype in _TRITON_DTYPES

    def _transform(self, states: torch.Tensor, positions: Positions) -> torch.Tensor:
        """Numbers `[B, H, T, K]`, float32, of states `[B, H, T, D]`, less the mean already if they are rotated."""
        states = states.float() if self.rope is None else apply_rope(states, self.rope, positions, is_undone=True)
        if self.is_rotated:
            return rotate(states)
        if self.mean is not None:
            states = states - self.mean.float()[:, :, None]
        return states if self.basis is None else self.basis.components(states)

    def _split(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batch_size, num_heads = tokens.shape[:2]
        most = _NUMBERS_ON_CPU if tokens.is_cpu else _NUMBERS_ON_GPU
        return tokens.split(max(most // (batch_size * num_heads * self.num_coded), 1), dim=2)

    def _encode(self, numbers: torch.Tensor) -> torch.Tensor:
        widths = self.widths.expand(len(numbers), -1, -1)
        normal = self._normalize(numbers)
        has_bits = (widths > 0).float()[:, :, None, :, None]
        count = (has_bits.sum(dim=(-1, -2), keepdim=True) * BLOCK).clamp(min=1)
        found, _ = _stored_scale(((normal * normal * has_bits).sum(dim=(-1, -2), keepdim=True) / count).sqrt())
        for number in range(1 + self.num_refits):
            scale = found
            codes = find_codes(normal / scale, widths)
            found, stored = _stored_scale(self._fitting_scale(normal, widths, self._points(codes, widths), scale))
            # Asked for only where it saves something: the host would wait for a GPU
            if number < self.num_refits and bool((found == scale).all()):
                break
        return pack_rows(codes, stored.flatten(3), widths, self.row_size)

    def _fitting_scale(
        self, normal: torch.Tensor, widths: torch.Tensor, points: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        """The scale `[B, H, T, 1, 1]` for points that were found with `scale`."""
        has_bits = (widths > 0).float()[:, :, None, :, None]
        # What reverse waterfilling has given bits to has energies in inverse proportion to its distortions
        weights = has_bits * 4.0 ** widths.float()[:, :, None, :, None]
        if self.is_weighted:
            over, under = weights * normal * points, weights * points * points
            return over.sum(dim=(-1, -2), keepdim=True) / under.sum(dim=(-1, -2), keepdim=True).clamp(min=1e-9)
        counted = weights * normal if self.by_energy else normal
        energy = (counted * normal).sum(dim=(-1, -2), keepdim=True)
        product = (counted * points).sum(dim=(-1, -2), keepdim=True)
        return torch.where(product > LEAST_GAIN * energy / scale, energy / product, scale)

    def _decode(self, rows: torch.Tensor) -> torch.Tensor:
        widths = self.widths.expand(len(rows), -1, -1)
        codes = unpack_rows(rows, widths)
        points = self._points(codes, widths).flatten(3)[..., : self.num_coded]
        if self.order is not None:
            order = self.order.long()[:, :, None].expand_as(points)
            points = torch.empty_like(points).scatter_(3, order, points)
        numbers = points * scale_of(rows[..., :1])
        return numbers if self.deviation is None else numbers * self.deviation.float()[:, :, None]

    def _normalize(self, numbers: torch.Tensor) -> torch.Tensor:
        """Numbers over their deviations in the order of the table, `[B, H, T, N, 8]`."""
        if self.deviation is not None:
            deviation = self.deviation.float()
            # A channel that does not vary is its mean
            numbers = numbers * torch.where(deviation > 0, 1 / deviation, 0)[:, :, None]
        if self.order is not None:
            numbers = numbers.gather(3, self.order.long()[:, :, None].expand_as(numbers))
        return F.pad(numbers, (0, -self.num_coded % BLOCK)).unflatten(3, (-1, BLOCK))

    def _points(self, codes: torch.Tensor, widths: torch.Tensor) -> torch.Tensor:
        """The points of codes `[B, H, T, N, 8]`, of values as large as what they stand for."""
        points = points_of(codes, widths)
        if self.is_weighted:
            return points
        gains = point_gains().to(points.device)
        return points * gains[widths.long()][:, :, None, :, None]


class SharedTables(nn.Module):
    """
    Tables of a layer's keys and values that all caches of a model share, brought once to every device that asks. As
    a part of the model it is a module, and no cache counts it as what it holds.
    """

    def __init__(self, keys: RowTable, values: RowTable):
        super().__init__()
        self._by_device = {keys.widths.device: (keys, values)}

    def on(self, device: torch.device | None) -> tuple[RowTable, RowTable]:
        """Returns the tables on a device, or those that it was made of."""
        if device is None:
            return next(iter(self._by_device.values()))
        if device not in self._by_device:
            keys, values = (table.map(lambda tensor: tensor.to(device)) for table in self.on(None))
            self._by_device[device] = keys, values
        return self._by_device[device]

    def tensors(self) -> Iterator[torch.Tensor]:
        """Lists the tensors of all devices that hold data."""
        for device, tables in self._by_device.items():
            if device.type != "meta":
                for table in tables:
                    yield from table.tensors()

    def __deepcopy__(self, memo: dict[int, Any]) -> "SharedTables":
        # Nothing ever changes it, and copies of a cache are to share it
        return self


class KeptRows(NamedTuple):
    """Rows that stay, from the `first` of `[B, H, any, R]` on, and the `capacity` that others behind them need."""

    rows: Rows
    first: int
    length: int
    capacity: int


@dataclass(eq=False, repr=False)
class RowCodec(Codec):
    """
    Codes keys and values by two tables: a cache's own, or a model's; without them the codec has still to be fitted.
    """

    _tables: tuple[RowTable, RowTable] | SharedTables | None
    _finer: "dict[int, RowCodec]" = field(init=False, default_factory=dict)

    has_kernels = True

    @property
    def is_shared(self) -> bool:
        """Whether the tables are a model's."""
        return isinstance(self._tables, SharedTables)

    def tables(self, device: torch.device | None = None) -> tuple[RowTable, RowTable]:
        """Returns the tables of keys and values, on a device if they are a model's."""
        assert self._tables is not None, "it has been fitted"
        return self._tables.on(device) if isinstance(self._tables, SharedTables) else self._tables

    def finer(self, nbits: int) -> "RowCodec":
        """Returns the codec of rows with `nbits` more bits a number; the same one as long as tables are the same."""
        if nbits not in self._finer:
            keys, values = (table.finer(nbits) for table in self.tables())
            self._finer[nbits] = RowCodec(SharedTables(keys, values) if self.is_shared else (keys, values))
        return self._finer[nbits]

    @property
    def rope(self) -> RotaryLayout:
        """The rotary embedding of keys."""
        rope = self.tables()[0].rope
        assert rope is not None, "keys have a layout, be it one that rotates nothing"
        return rope

    @property
    def row_sizes(self) -> tuple[int, int]:
        keys, values = self.tables()
        return keys.row_size, values.row_size

    @property
    def head_shapes(self) -> list[tuple[int, int]]:
        """Heads and head dim of keys and of values."""
        return [(table.widths.shape[1], table.head_dim) for table in self.tables()]

    @property
    def kernel_kind(self) -> Hashable:
        return tuple((table.row_size, table.num_coded) for table in self.tables())

    def check_shapes(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        for states, (num_heads, head_dim) in zip((keys, values), self.head_shapes, strict=True):
            if states.shape[1::2] != (num_heads, head_dim):
                raise ValueError(
                    f"`calibration` is of {num_heads} heads of {head_dim}, but got {states.shape[1]} of "
                    f"{states.shape[3]}: it was made for another model"
                )

    def encode(self, keys: torch.Tensor, values: torch.Tensor, positions: Positions) -> Rows:
        own = self._tables
        of_keys, of_values = own if isinstance(own, tuple) else self.tables(keys.device)
        return of_keys.encode(keys, positions), of_values.encode(values, positions)

    def recode(self, rows: Rows, finer: "RowCodec") -> Rows:
        """Codes rows of keys and of values of a codec that this has made by `finer` as its own."""
        tables = zip(self.tables(rows[0].device), rows, finer.tables(rows[0].device), strict=True)
        keys, values = (table.recode(own, other) for table, own, other in tables)
        return keys, values

    def decode_keys(self, rows: torch.Tensor, positions: Positions) -> torch.Tensor:
        return self.tables(rows.device)[0].decode(rows, positions)

    def decode_keys_at(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Decodes rows to keys `[B, H, T, D]`, float32, at any positions `[B, H, T]`."""
        table = self.tables(rows.device)[0]
        cosines, sines = self.rope.angles(positions)
        return self.rope.rotate(table.decode(rows, None), cosines, sines)

    def decode_values(self, rows: torch.Tensor) -> torch.Tensor:
        return self.tables(rows.device)[1].decode(rows)

    def too_large(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor | None:
        if keys.is_meta:
            return None
        return ((keys[..., 0] == LAST_SCALE) | (values[..., 0] == LAST_SCALE)).any(dim=1)

    def tensors(self) -> Iterator[torch.Tensor]:
        if self._tables is not None and not self.is_shared:
            yield from (tensor for table in self.tables() for tensor in table.tensors())
            yield from (table.widths for codec in self._finer.values() for table in codec.tables())

    def shared_tensors(self) -> Iterator[torch.Tensor]:
        if isinstance(self._tables, SharedTables):
            yield from self._tables.tensors()

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "RowCodec":
        if not isinstance(self._tables, tuple):
            return self
        keys, values = self._tables
        return dataclasses.replace(self, _tables=(keys.map(function), values.map(function)))


def _stored_scale(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A scale `[B, H, T, 1, 1]` as it comes back, and the byte that it is stored as."""
    steps = (scale.clamp(min=1e-6).log2() * SCALE_STEPS).round() + SCALE_OFFSET
    stored = steps.nan_to_num(0).clamp(0, LAST_SCALE).to(torch.uint8)
    return scale_of(stored), stored


def scale_of(stored: torch.Tensor) -> torch.Tensor:
    """The scales that bytes stand for."""
    return torch.exp2((stored.float() - SCALE_OFFSET) / SCALE_STEPS)
