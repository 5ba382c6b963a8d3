"""`PromptCodec`: rows in formats that are fitted to a prompt's own tokens, and serve those that follow.

The energy of a channel of keys is its variance times the mean square of the queries at that channel, which is the
weight of an error there in a score. Both are taken before the rotary embedding: the angles of each key in turn are
undone in every query. `bit_allocation` gives the bits to blocks of channels of similar energy.

Formats are a cache's own, so they are in its files. Compiled code reads rows by the widths of a format and channels by
its order, without a check of bounds: every number of a file is checked here.

Legend: B batch, H key/value heads, T tokens, D head dim, C layouts, N blocks of eight channels, R bytes of a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from kvcache_plugins.files.schema import Stored, check_layout
from kvcache_plugins.formats.positions import Positions
from kvcache_plugins.formats.quantizer import BLOCK, DISTORTIONS, MAX_WIDTH, num_blocks
from kvcache_plugins.formats.rotary import RotaryLayout, channels_of
from kvcache_plugins.formats.rows import RowFormat, RowFormats, Rows
from kvcache_plugins.kernels.ops import channel_moments, decode_rows

from .bit_allocation import allocate_channels, order_dtype
from .codec import CodecState, QueryMoments, Sample
from .rows import RowCodec


# Relative tolerance of frequencies that another machine or release computed: a few roundings of float32
_TOLERANCE = 1e-6
# Number of newest tokens with which layouts are compared by default, and shared errors are found
_NUM_NEWEST = 256
# Shares of a head's mean square below which its variance, of values or of the median channel of keys, is that of a
# prompt that hardly varies. Ordinary text has .44 and .019 at least, a repeated token 1e-4 and 1e-8 at most
_STEADY_VALUES, _STEADY_KEYS = 1 / 8, 1 / 1024
# Least deviations of such heads, and of any channel of keys, over a head's root mean square. Values of ordinary text
# after newlines were up to 21 times as large as those of newlines; scales end at 246 deviations, and scales of values
# are up to 3 times a token's
_LEAST_OF_STEADY, _LEAST_OF_CHANNEL = 1 / 2, 1 / 256
# Least share of the energy of errors, common to all tokens, at which means are corrected
_LEAST_SHARED = 1 / 8
# Least and largest number of float16
_TINY, _LARGEST = 2.0**-24, torch.finfo(torch.float16).max
# Least reduction of the logarithm of the error for which a layout other than the first is taken
_LEAST_GAIN = 0.05


@dataclasses.dataclass(eq=False, repr=False)
class PromptCodec(RowCodec):
    """
    Encodes keys and values in two formats that `fit` makes.

    Args:
        head_dims, sizes (two `int`): channels of a key and of a value, and bytes of their codes.
        layouts (`Sequence[RotaryLayout]`): layouts that the model's keys may have.
        fitted_length (`int`): see `PackingCodec`.
        compares_all (`bool`): True if layouts are compared with all tokens, as some may have other positions than the
            newest.
    """

    _formats: RowFormats | None = dataclasses.field(default=None, kw_only=True)
    fitted_length: int = dataclasses.field(default=0, kw_only=True)
    compares_all: bool = dataclasses.field(default=False, kw_only=True)
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
        num_compared = keys.shape[2] if self.compares_all else _NUM_NEWEST
        key_format = make_key_format(keys, valid, moments, self.layouts, positions, size, num_compared)
        formats = key_format, make_value_format(values, valid, value_size)
        least_padding = 0 if positions.padding is None else int(positions.padding.min())
        fitted_length = positions.first + keys.shape[2] - least_padding
        return dataclasses.replace(self, _formats=formats, fitted_length=fitted_length)

    def refit(self, number: int, sample: Sample) -> PromptCodec:
        if (moments := sample.moments) is not None:
            place = self.layouts.index(self.rope)
            moments = QueryMoments(moments.squares[number, None], moments.products[number, None, :, place, None])
        fitted = dataclasses.replace(self, layouts=[self.rope]).fit(sample._replace(moments=moments))
        (of_keys, of_values), (one, other) = self.formats(), fitted.formats()
        formats = of_keys.with_sequence(number, one), of_values.with_sequence(number, other)
        return dataclasses.replace(self, _formats=formats)

    def with_bias_correction(self, rows: Rows, sample: Sample) -> PromptCodec:
        """
        Add to means the errors that all tokens of a prompt share, in heads where these are a large share of all
        errors: a prompt of few distinct tokens has few distinct errors, which attention cannot average.
        """
        keys, values, valid, _, positions = sample
        if keys.is_meta or self._formats is None:
            return self
        tail = slice(max(keys.shape[2] - _NUM_NEWEST, 0), None)
        at = Positions(positions.first + tail.start, positions.padding)
        valid = None if valid is None else valid[:, tail]
        corrected = []
        for row_format, states, coded in zip(self._formats, (keys, values), rows, strict=True):
            errors = states[:, :, tail].float() - decode_rows(coded[:, :, tail], row_format, at)
            shared, variance = channel_moments(errors, valid, row_format.rope, at)
            energy = shared.square()
            shared = shared * (energy.sum(dim=2) > _LEAST_SHARED * (energy + variance).sum(dim=2))[:, :, None]
            if row_format.mean is not None or bool((shared != 0).any()):
                mean = shared if row_format.mean is None else row_format.mean.float() + shared
                row_format = dataclasses.replace(row_format, mean=mean.clamp(-_LARGEST, _LARGEST).half())
            corrected.append(row_format)
        return dataclasses.replace(self, _formats=(corrected[0], corrected[1]))

    def state(self) -> CodecState | None:
        if self._formats is None:
            return None
        keys, values = self.formats()
        return CodecState(
            rotary=self.rope.name,
            first_rotated=self.rope.first,
            frequencies=torch.tensor(self.rope.frequencies, dtype=torch.float32, device="cpu"),
            keys=dict(keys.named_tensors()),
            values=dict(values.named_tensors()),
            fitted_length=self.fitted_length,
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
        keys = _read_format(f"{path}.keys", state.keys, heads, key_dim, size, layout)
        values = _read_format(f"{path}.values", state.values, heads, value_dim, value_size)
        return dataclasses.replace(self, _formats=(keys, values), fitted_length=state.fitted_length or 0)


def make_key_format(
    keys: torch.Tensor,
    valid: torch.Tensor,
    moments: QueryMoments | None,
    layouts: Sequence[RotaryLayout],
    positions: Positions,
    total: int,
    num_compared: int = _NUM_NEWEST,
) -> RowFormat:
    """
    Make the format of a prompt's keys `[B, H, T, D]`, after the rotary embedding, with widths of `total` in a head.

    Args:
        valid (`torch.Tensor` of shape `[B, T]`, bool): tokens that count, which follow each other.
        moments (`QueryMoments`, *optional*): moments of queries; without them all channels count the same.
        layouts (`Sequence[RotaryLayout]`): layouts that keys may have. The one of the least expected error is taken,
            if that is clearly less than the first one's.
        num_compared (`int`, *optional*): newest tokens with which layouts are compared.
    """
    number = 0
    if keys.is_meta:
        # Without data only the size of the format is known
        moments = None
    elif len(layouts) > 1:
        first, energies = max(keys.shape[2] - num_compared, 0), []
        newest = keys[:, :, first:], valid[:, first:], moments, positions.after(first)
        for other in range(len(layouts)):
            # The variance of keys that hardly vary tells layouts apart, but says nothing of keys to come
            _, variance, queried = _key_moments(*newest, layouts, other)
            energies.append(variance * queried)
        errors, *_ = allocate_channels(torch.stack(energies, dim=2), total, DISTORTIONS)
        # Without a clear difference the first is taken, so that a sequence's layout does not depend on others
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
    return _make_format(keys.shape[3], total, mean, variance.sqrt(), widths, order, layouts[number])


def _key_moments(
    keys: torch.Tensor,
    valid: torch.Tensor,
    moments: QueryMoments | None,
    positions: Positions,
    layouts: Sequence[RotaryLayout],
    number: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Compute means of channels as they are stored, variances about these, and mean squares of queries with the RoPE of
    keys undone, averaged over keys, up to a factor; all `[B, H, D]`, in the layout of a number.
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


def make_value_format(values: torch.Tensor, valid: torch.Tensor, total: int) -> RowFormat:
    """
    Make the format of a prompt's values `[B, H, T, D]`: one deviation a head, and the same bits for all channels.

    Heads that hardly vary, as where a prompt repeats one token, have a mean: their errors are the same in all tokens,
    so that sums do not cancel them. The mean is 0 in other heads, and `None` if no head hardly varies.
    """
    batch_size, num_heads, _, head_dim = values.shape
    mean, variance = channel_moments(values, valid)
    # The rotation of values keeps their energy
    energy, stored_mean = (mean.square() + variance).mean(dim=2), None
    is_steady = variance.mean(dim=2) < _STEADY_VALUES * energy
    if not values.is_meta and bool(is_steady.any()):
        stored_mean = (mean * is_steady[:, :, None]).clamp(-_LARGEST, _LARGEST).half()
        energy = ((mean - stored_mean.float()).square() + variance).mean(dim=2)
    deviation = energy.sqrt()
    if stored_mean is not None:
        deviation = deviation.maximum(_LEAST_OF_STEADY * stored_mean.float().square().mean(dim=2).sqrt())
    # Blocks of the same energy have two neighbouring widths, the wider first: kernels rely on it
    width, rest = divmod(total, -(-head_dim // BLOCK))
    shape = batch_size, num_heads, -(-head_dim // BLOCK)
    widths = torch.full(shape, width, dtype=torch.int64, device=values.device)
    widths[..., :rest] += 1
    return _make_format(head_dim, total, stored_mean, deviation[:, :, None], widths)


def _make_format(
    head_dim: int,
    size: int,
    mean: torch.Tensor | None,
    deviation: torch.Tensor,
    widths: torch.Tensor,
    order: torch.Tensor | None = None,
    rope: RotaryLayout | None = None,
) -> RowFormat:
    """Make the format of keys with a rotary embedding, or of values, whose codes take `size` bytes."""
    # In float16 0 stays 0, and no other number becomes 0
    deviation = torch.where(deviation > 0, deviation.clamp(_TINY, _LARGEST), 0).half()
    is_of_keys = rope is not None
    own = order, mean, deviation, widths.to(torch.uint8), 1 + size, head_dim, is_of_keys
    return RowFormat(*own, rope=rope, is_rotated=not is_of_keys)


def _read_format(
    path: str,
    tensors: dict[str, torch.Tensor],
    heads: tuple[int, int],
    head_dim: int,
    size: int,
    rope: RotaryLayout | None = None,
) -> RowFormat:
    """Make the format of keys with a rotary embedding, or of values, of tensors of a file: see `_make_format`."""
    shape, is_of_keys = (*heads, head_dim), rope is not None
    layout = {
        "deviation": Stored(shape if is_of_keys else (*heads, 1), torch.float16, least=0),
        "widths": Stored((*heads, num_blocks(head_dim)), torch.uint8, most=MAX_WIDTH),
    }
    if is_of_keys:
        layout["order"] = Stored(shape, order_dtype(head_dim))
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
    return _make_format(head_dim, size, tensors.get("mean"), tensors["deviation"], widths, order, rope)
