"""`PromptCodec`: rows coded by tables that a prompt's own tokens say are best for them, and for those that follow.

The energy of a channel of keys is its variance, which is what is left to code, times the mean square of the queries at
that channel, which is what an error there does to a score. Both are taken before the rotary embedding, as if every
query had been turned back by the angles of all keys in turn.

Bits are given out by reverse waterfilling over blocks of channels of like energy. The error of a channel is its energy
times the distortion of its width. Bits go to the blocks whose errors they lessen most, which is the best there is, as
every further bit of a block lessens it by less.

Tables are a cache's own, so they are in its files. Compiled code reads rows by the widths of a table and channels by
its order, and does not look whether they lead out of what is there: every number that is read is checked.

Legend: B batch, H key/value heads, T tokens, D head dim, C layouts, N blocks of eight channels, R bytes of a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from kvcache_plugins.files.schema import Stored, check_layout
from kvcache_plugins.kernels.engine import choose_coding_kernel

from .codec import CodecState, Positions, QueryMoments, Rows, Sample
from .quantizer import BLOCK, DISTORTIONS, MAX_WIDTH, num_blocks
from .rope import START, RotaryLayout, apply_rope, channels_of
from .rows import RowCodec, RowTable


# Relative, of frequencies that another machine or release computed: a few roundings of float32
_TOLERANCE = 1e-6
# Tokens that tell layouts apart, and which errors are shared
_NUM_NEWEST = 256
# Of a head's mean square: what varies of values, and in the median channel of keys, where a prompt hardly does. Of
# ordinary text that is .44 and .019 at least, of a repeated token 1e-4 and 1e-8 at most
_STEADY_VALUES, _STEADY_KEYS = 1 / 8, 1 / 1024
# Least deviations there, and of any channel of keys, over a head's size: ordinary text that follows was up to 21 times
# as large as values of newlines, scales end at 246 deviations, and of values they are up to 3 times a token's
_LEAST_OF_STEADY, _LEAST_OF_CHANNEL = 1 / 2, 1 / 256
# How much of the energy of errors has to be shared
_LEAST_SHARED = 1 / 8
# Of float16
_TINY, _LARGEST = 2.0**-24, torch.finfo(torch.float16).max
# In which channels of a head are numbered: of more than so many the second
_ORDER_DTYPES, _MOST_BYTES = (torch.uint8, torch.int16), 256
# By how much the logarithm of the error has to be less than the first layout's for another one
_LEAST_GAIN = 0.05


@dataclasses.dataclass(eq=False, repr=False)
class PromptCodec(RowCodec):
    """
    Codes keys and values by two tables that `fit` makes.

    Args:
        head_dims, sizes (two `int`): channels of a key and of a value, and bytes of their codes.
        layouts (`Sequence[RotaryLayout]`): those that the model's keys may have.
    """

    _tables: tuple[RowTable, RowTable] | None = dataclasses.field(default=None, kw_only=True)
    head_dims: tuple[int, int]
    sizes: tuple[int, int]
    layouts: Sequence[RotaryLayout]

    @property
    def row_sizes(self) -> tuple[int, int]:
        return 1 + self.sizes[0], 1 + self.sizes[1]

    def check_shapes(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        return None

    def fit(self, sample: Sample) -> PromptCodec:
        keys, values, valid, moments, positions = sample
        assert valid is not None, "a cache knows which of its tokens count"
        valid, (size, value_size) = valid.to(keys.device), self.sizes
        table = make_key_table(keys, valid, moments, self.layouts, positions, size)
        tables = table, make_value_table(values, valid, value_size)
        return dataclasses.replace(self, _tables=tables)

    def refit(self, number: int, sample: Sample) -> PromptCodec:
        if (moments := sample.moments) is not None:
            place = self.layouts.index(self.rope)
            moments = QueryMoments(moments.squares[number, None], moments.products[number, None, :, place, None])
        fitted = dataclasses.replace(self, layouts=[self.rope]).fit(sample._replace(moments=moments))
        (of_keys, of_values), (one, other) = self.tables(), fitted.tables()
        tables = of_keys.with_sequence(number, one), of_values.with_sequence(number, other)
        return dataclasses.replace(self, _tables=tables)

    def without_shared_errors(self, rows: Rows, sample: Sample) -> PromptCodec:
        """
        Adds to means the errors that all tokens of a prompt have in common, in heads where these are a large share of
        all errors: a prompt of few distinct tokens has few distinct errors, which attention cannot average.
        """
        keys, values, valid, _, positions = sample
        if keys.is_meta or self._tables is None:
            return self
        tail = slice(max(keys.shape[2] - _NUM_NEWEST, 0), None)
        at = Positions(positions.first + tail.start, positions.padding)
        valid = None if valid is None else valid[:, tail]
        tables = []
        for table, states, coded in zip(self._tables, (keys, values), rows, strict=True):
            errors = states[:, :, tail].float() - table.decode(coded[:, :, tail], at)
            shared, variance = channel_moments(errors, valid, table.rope, at)
            energy = shared.square()
            shared = shared * (energy.sum(dim=2) > _LEAST_SHARED * (energy + variance).sum(dim=2))[:, :, None]
            if table.mean is not None or bool((shared != 0).any()):
                mean = shared if table.mean is None else table.mean.float() + shared
                table = dataclasses.replace(table, mean=mean.clamp(-_LARGEST, _LARGEST).half())
            tables.append(table)
        return dataclasses.replace(self, _tables=(tables[0], tables[1]))

    def state(self) -> CodecState | None:
        if self._tables is None:
            return None
        keys, values = self.tables()
        return CodecState(
            rotary=self.rope.name,
            first_rotated=self.rope.first,
            frequencies=torch.tensor(self.rope.frequencies, dtype=torch.float32, device="cpu"),
            keys=dict(keys.named_tensors()),
            values=dict(values.named_tensors()),
        )

    def restore(self, state: CodecState, heads: tuple[int, int], path: str) -> PromptCodec:
        known = state.rotary, state.first_rotated, state.frequencies.shape
        for layout in self.layouts:
            own = torch.tensor(layout.frequencies, dtype=torch.float32, device="cpu")
            if (layout.name, layout.first, own.shape) == known and torch.allclose(
                state.frequencies, own, rtol=_TOLERANCE, atol=0.0
            ):
                break
        else:
            raise ValueError(
                f"`{path}`: keys were coded with another rotary embedding than the model's config describes"
            )
        (key_dim, value_dim), (size, value_size) = self.head_dims, self.sizes
        keys = _table(f"{path}.keys", state.keys, heads, key_dim, size, layout)
        values = _table(f"{path}.values", state.values, heads, value_dim, value_size)
        return dataclasses.replace(self, _tables=(keys, values))


def make_key_table(
    keys: torch.Tensor,
    valid: torch.Tensor,
    moments: QueryMoments | None,
    layouts: Sequence[RotaryLayout],
    positions: Positions,
    total: int,
) -> RowTable:
    """
    Makes the table of a prompt's keys `[B, H, T, D]`, after the rotary embedding, with widths of `total` in a head.

    Args:
        valid (`torch.Tensor` of shape `[B, T]`, bool): tokens that count, which follow each other.
        moments (`QueryMoments`, *optional*): of queries; without them all channels count the same.
        layouts (`Sequence[RotaryLayout]`): those that keys may have, of which the one of the least error to be
            expected is taken, if that is clearly less than the first one's.
    """
    number = 0
    if keys.is_meta:
        # Nothing is known of what has no data but how large its table is
        moments = None
    elif len(layouts) > 1:
        first, energies = max(keys.shape[2] - _NUM_NEWEST, 0), []
        newest = keys[:, :, first:], valid[:, first:], moments, positions.after(first)
        for other in range(len(layouts)):
            # How keys vary that hardly do tells layouts apart, but says nothing of those to come
            _, variance, queried = _key_moments(*newest, layouts, other)
            energies.append(variance * queried)
        errors, *_ = allocate_channels(torch.stack(energies, dim=2), total, DISTORTIONS)
        # Where it makes no difference the first is taken, so that sequences do not choose for each other
        logarithms = errors.clamp(min=torch.finfo(errors.dtype).tiny).log().mean(dim=(0, 1))
        logarithms[1:] += _LEAST_GAIN
        number = int(logarithms.argmin())
    mean, variance, queried = _key_moments(keys, valid, moments, positions, layouts, number)
    size = (mean.float().square() + variance).mean(dim=-1, keepdim=True)
    is_steady = variance.median(dim=-1, keepdim=True).values < _STEADY_KEYS * size
    # A channel that is constant among others that are not is exact, and has nothing to come
    least = torch.full_like(variance, _LEAST_OF_CHANNEL).masked_fill_(~(variance > 0), 0)
    least = least.masked_fill_(is_steady, _LEAST_OF_STEADY)
    variance = variance.maximum(least.square() * size)
    _, order, widths = allocate_channels(variance * queried, total, DISTORTIONS)
    return _make_table(keys.shape[3], total, mean, variance.sqrt(), widths, order, layouts[number])


def _key_moments(
    keys: torch.Tensor,
    valid: torch.Tensor,
    moments: QueryMoments | None,
    positions: Positions,
    layouts: Sequence[RotaryLayout],
    number: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Means of channels as they are stored, variances about these, and mean squares of queries with the RoPE of keys
    undone, averaged over keys, up to a factor; all `[B, H, D]`, in the layout of a number.
    """
    exact, variance = channel_moments(keys, valid, layouts[number], positions)
    mean = exact.clamp(-_LARGEST, _LARGEST).half()
    variance = variance + (exact - mean.float()).square()
    if moments is None:
        return mean, variance, torch.ones_like(variance)
    partners, rates = channels_of(layouts[number], keys.device)
    # Cosines and sines of twice the angles of tokens one behind the other have a mean in closed form
    count = valid.sum(dim=1).clamp(min=1)[:, None]
    first = positions.first + valid.byte().argmax(dim=1)
    first = (first if positions.padding is None else first - positions.padding.to(keys.device))[:, None]
    share = torch.where(rates == 0, 1, (count * rates).sin() / (count * rates.sin()))
    middle = (2 * first + count - 1) * rates
    cosines, sines = (middle.cos() * share).float()[:, None], (middle.sin() * share).float()[:, None]
    own, others = moments.squares, moments.squares[..., partners]
    queried = own + others + (own - others) * cosines - 2 * moments.products[:, :, number] * sines
    return mean, variance, queried.clamp(min=0)


def make_value_table(values: torch.Tensor, valid: torch.Tensor, total: int) -> RowTable:
    """
    Makes the table of a prompt's values `[B, H, T, D]`: one deviation a head, and bits alike for all channels.

    Heads that hardly vary, as where a prompt repeats one token, have a mean: their errors are the same in all tokens,
    so that sums do not lose them. It is 0 in other heads, and `None` if there are only such.
    """
    batch_size, num_heads, _, head_dim = values.shape
    mean, variance = channel_moments(values, valid)
    # Rotated, as they are coded, they are as large
    energy, stored_mean = (mean.square() + variance).mean(dim=2), None
    is_steady = variance.mean(dim=2) < _STEADY_VALUES * energy
    if not values.is_meta and bool(is_steady.any()):
        stored_mean = (mean * is_steady[:, :, None]).clamp(-_LARGEST, _LARGEST).half()
        energy = ((mean - stored_mean.float()).square() + variance).mean(dim=2)
    deviation = energy.sqrt()
    if stored_mean is not None:
        deviation = deviation.maximum(_LEAST_OF_STEADY * stored_mean.float().square().mean(dim=2).sqrt())
    # Of the same energy, blocks have two neighbouring widths, the wider first: kernels count on it
    width, rest = divmod(total, -(-head_dim // BLOCK))
    shape = batch_size, num_heads, -(-head_dim // BLOCK)
    widths = torch.full(shape, width, dtype=torch.int64, device=values.device)
    widths[..., :rest] += 1
    return _make_table(head_dim, total, stored_mean, deviation[:, :, None], widths)


def _make_table(
    head_dim: int,
    size: int,
    mean: torch.Tensor | None,
    deviation: torch.Tensor,
    widths: torch.Tensor,
    order: torch.Tensor | None = None,
    rope: RotaryLayout | None = None,
) -> RowTable:
    """Makes the table of keys of a rotary embedding, or of values, whose codes take `size` bytes."""
    # In float16 0 stays 0, what is not 0 does not become it
    deviation = torch.where(deviation > 0, deviation.clamp(_TINY, _LARGEST), 0).half()
    is_of_keys = rope is not None
    own = order, mean, deviation, widths.to(torch.uint8), 1 + size, head_dim, is_of_keys
    return RowTable(*own, rope=rope, is_rotated=not is_of_keys)


def channel_moments(
    states: torch.Tensor,
    valid: torch.Tensor | None,
    layout: RotaryLayout | None = None,
    positions: Positions = START,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Computes means and variances of channels `[B, H, D]`, float32, of states `[B, H, T, D]` of any floating dtype whose
    rotary embedding is undone, and of which all tokens count or those `valid` `[B, T]`.
    """
    if choose_coding_kernel(states, states.shape[3]) == "compiled":
        from kvcache_plugins.kernels import cpu_coding

        return cpu_coding.channel_moments(states, valid, layout, positions)
    count = states.shape[2] if valid is None else valid.sum(dim=1).clamp(min=1)[:, None, None]
    counts = torch.ones((), dtype=torch.bool, device=states.device) if valid is None else valid[:, None, :, None]
    states = states.float() if layout is None else apply_rope(states, layout, positions, is_undone=True)
    mean = (torch.where(counts, states, 0).sum(dim=2, dtype=torch.float64) / count).float()
    squares = torch.where(counts, states - mean[:, :, None], 0).square_()
    return mean, (squares.sum(dim=2, dtype=torch.float64) / count).float()


def _table(
    path: str,
    tensors: dict[str, torch.Tensor],
    heads: tuple[int, int],
    head_dim: int,
    size: int,
    rope: RotaryLayout | None = None,
) -> RowTable:
    """Makes the table of keys of a rotary embedding, or of values, whose codes take `size` bytes."""
    shape, is_of_keys = (*heads, head_dim), rope is not None
    layout = {
        "deviation": Stored(shape if is_of_keys else (*heads, 1), torch.float16, least=0),
        "widths": Stored((*heads, num_blocks(head_dim)), torch.uint8, most=MAX_WIDTH),
    }
    if is_of_keys:
        layout["order"] = Stored(shape, _ORDER_DTYPES[head_dim > _MOST_BYTES])
    if is_of_keys or "mean" in tensors:
        layout["mean"] = Stored(shape, torch.float16)
    check_layout(path, tensors, layout)
    order, widths = tensors.get("order"), tensors["widths"]
    channels = torch.arange(head_dim, dtype=torch.int64, device="cpu")
    if order is not None and not bool((order.sort(dim=-1).values == channels).all()):
        raise ValueError(f"`{path}.order` has to name every channel once")
    if bool((widths.sum(dim=-1) != size).any()):
        raise ValueError(f"`{path}.widths` have to be {size} together in every head")
    is_wider, is_much_wider = widths[..., 1:] > widths[..., :-1], widths[..., 0] > widths[..., -1] + 1
    if not is_of_keys and bool(is_wider.any() | is_much_wider.any()):
        raise ValueError(f"`{path}.widths` have to be the same but for one bit, the wider first")
    return _make_table(head_dim, size, tensors.get("mean"), tensors["deviation"], widths, order, rope)


def allocate_widths(energies: torch.Tensor, total: int, distortions: tuple[float, ...]) -> torch.Tensor:
    """
    Finds widths of blocks `[B, H, N]`, int64, `total` in a head, so that the sum of `energy * distortion(width)` is
    least: of energies `[B, H, N]`, and distortions of a normal variable at all widths from 0 on.
    """
    errors = torch.tensor(distortions, device=energies.device, dtype=energies.dtype)
    most = len(errors) - 1
    # Of equals, as where nothing has energy, all get the same first
    energies = energies.clamp(min=torch.finfo(energies.dtype).tiny)
    gains = (energies[..., None] * (errors[:-1] - errors[1:])).flatten(-2)  # [B, H, N * the largest width]
    blocks = gains.sort(dim=-1, descending=True, stable=True).indices[..., :total] // most
    widths = torch.zeros(energies.shape, dtype=torch.int64, device=energies.device)
    return widths.scatter_add_(-1, blocks, torch.ones_like(blocks))


def allocate_channels(
    energy: torch.Tensor, total: int, distortions: tuple[float, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Orders channels of energies `[..., D]` so that these fall; returns the squared error to be expected of every head
    `[...]`, the order as it is stored, and widths of blocks `[..., N]`.
    """
    energy, order = energy.sort(dim=-1, descending=True)
    by_block = F.pad(energy, (0, -energy.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK)).sum(dim=-1)
    widths = allocate_widths(by_block, total, distortions)
    errors = (by_block * torch.tensor(distortions, device=energy.device, dtype=energy.dtype)[widths]).sum(dim=-1)
    return errors, order.to(_ORDER_DTYPES[order.shape[-1] > _MOST_BYTES]), widths


def share_bytes(energies: Sequence[torch.Tensor], total: int, least: int, errors: tuple[float, ...]) -> list[int]:
    """
    Shares `total` bytes, those of every head counted, between sides of layers, in each of which every head has as many
    and at least `least`, so that the sum of `energy * distortion(width)` is least: of energies of their blocks
    `[H, N]`, and distortions as in `allocate_widths`. Returns the bytes of a head of every side.
    """
    distortions = torch.tensor(errors, dtype=torch.float64, device="cpu")
    gains, owners = [], []
    for number, side in enumerate(energies):
        each = side.double().cpu()[..., None] * (distortions[:-1] - distortions[1:])
        # The byte that a head takes next gains less than the one before, and so does its mean over heads
        ordered = each.flatten(1).sort(dim=1, descending=True).values.mean(dim=0)
        ordered[:least] = torch.inf
        gains.append(ordered)
        owners.append(torch.full_like(ordered, number, dtype=torch.int64))
    order = torch.cat(gains).argsort(descending=True, stable=True)
    taken = torch.cat(owners)[order]
    costs = torch.tensor([side.shape[0] for side in energies], dtype=torch.int64, device="cpu")[taken].cumsum(dim=0)
    counts: list[int] = torch.bincount(taken[costs <= total], minlength=len(energies)).tolist()
    return [max(count, least) for count in counts]
