"""Tables made of a prompt: statistics of its keys and values, and of the queries that asked for them.

The energy of a channel of keys is its variance, which is what is left to code, times the mean square of the queries at
that channel, which is what an error there does to a score. Both are taken before the rotary embedding, as if every
query had been turned back by the angles of all keys in turn.

Legend: B batch, H key/value heads, G query heads a key/value head, T tokens, Q queries, D head dim, C layouts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .allocation import BLOCK, allocate_widths, even_widths, expected_distortion, num_blocks
from .quantizers import QUANTIZERS
from .rotary import RotaryLayout
from .rows import RowTable, order_dtype


# Tokens that tell layouts apart
_NUM_NEWEST = 256
# Of a head's mean square: what varies of values, and in the median channel of keys, where a prompt hardly does. Of
# ordinary text that is .44 and .019 at least, of a repeated token 1e-4 and 1e-8 at most
_STEADY_VALUES, _STEADY_KEYS = 1 / 8, 1 / 1024
# Least deviations there, and of any channel of keys, over a head's size: ordinary text that follows was up to 21 times
# as large as values of newlines, scales end at 246 deviations, and of values they are up to 3 times a token's
_LEAST_OF_STEADY, _LEAST_OF_CHANNEL = 1 / 2, 1 / 256
# Of float16
_TINY, _LARGEST = 2.0**-24, torch.finfo(torch.float16).max
# By how much the logarithm of the error has to be less than the first layout's for another one
_LEAST_GAIN = 0.05


@dataclass(frozen=True, eq=False)
class QueryMoments:
    """
    Sums over queries, by key/value head.

    Attributes:
        squares (`torch.Tensor` of shape `[B, H, D]`): of squared channels.
        products (`torch.Tensor` of shape `[B, H, C, D]`): of channels times their partners in every layout.
    """

    squares: torch.Tensor
    products: torch.Tensor

    @classmethod
    def of(
        cls, query: torch.Tensor, num_heads: int, layouts: Sequence[RotaryLayout], valid: torch.Tensor | None
    ) -> "QueryMoments":
        """
        Args:
            query (`torch.Tensor` of shape `[B, H * G, Q, D]`): queries, after the rotary embedding.
            num_heads (`int`): H.
            layouts (`Sequence[RotaryLayout]`): C of them.
            valid (`torch.Tensor` of shape `[B, Q]`, bool, *optional*): queries that are not padding.
        """
        query = query.float()
        if valid is not None:
            query = query * valid[:, None, :, None]
        query = query.unflatten(1, (num_heads, -1))
        products = [(query * query[..., layout.partners(query.device)]).sum(dim=(2, 3)) for layout in layouts]
        return cls((query * query).sum(dim=(2, 3)), torch.stack(products, dim=2))

    def plus(self, other: "QueryMoments") -> "QueryMoments":
        return QueryMoments(self.squares + other.squares, self.products + other.products)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "QueryMoments":
        return QueryMoments(function(self.squares), function(self.products))


@dataclass(frozen=True, eq=False)
class Angles:
    """Those of a layout at the positions of T tokens: cosines and signed sines `[1 or B, 1, T, D]`."""

    cosines: torch.Tensor
    sines: torch.Tensor

    @classmethod
    def at(
        cls, layout: RotaryLayout, start: int, count: int, padding: torch.Tensor | None, device: torch.device
    ) -> "Angles":
        """Of `count` tokens from index `start` on; positions are counted from behind the padding `[B]`."""
        positions = torch.arange(start, start + count, device=device)[None]
        if padding is not None:
            positions = positions - padding.to(device)[:, None]
        return cls(*(angles[:, None] for angles in layout.angles(positions)))


def make_key_table(
    keys: torch.Tensor,
    valid: torch.Tensor,
    moments: QueryMoments | None,
    layouts: Sequence[RotaryLayout],
    start: int,
    padding: torch.Tensor | None,
    total: int,
    quantizer: str = "lloyd-max",
) -> tuple[RowTable, int]:
    """
    The table of a prompt's keys, and which of the layouts they have: the one of the least error to be expected, if
    that is clearly less than the first one's.

    Args:
        keys (`torch.Tensor` of shape `[B, H, T, D]`): keys, after the rotary embedding.
        valid (`torch.Tensor` of shape `[B, T]`, bool): tokens that count.
        moments (`QueryMoments`, *optional*): of queries; without them all channels count the same.
        layouts (`Sequence[RotaryLayout]`): candidates.
        start (`int`): index of the first token.
        padding (`torch.Tensor` of shape `[B]`, *optional*): of every item; positions are counted from behind it.
        total (`int`): sum of a head's widths.
        quantizer (`str`, *optional*, defaults to `"lloyd-max"`): one of `QUANTIZERS`.
    """
    count, best = keys.shape[2], 0
    # Nothing is known of what has no data but how large its table is
    if keys.is_meta:
        moments = None
    elif len(layouts) > 1:
        num_newest = min(_NUM_NEWEST, count)
        newest, counting = keys[:, :, count - num_newest :].float(), valid[:, count - num_newest :]
        logarithms = []
        for number, layout in enumerate(layouts):
            at = Angles.at(layout, start + count - num_newest, num_newest, padding, keys.device)
            table = key_table_of_layout(newest, counting, moments, number, layout, at, total, quantizer)
            logarithms.append(table[1])
        # Where it makes no difference the first is taken, so that items do not choose for each other
        errors = torch.stack(logarithms) / (keys.shape[0] * keys.shape[1])
        errors[1:] += _LEAST_GAIN
        best = int(errors.argmin())
    layout = layouts[best]
    at = Angles.at(layout, start, count, padding, keys.device)
    return key_table_of_layout(keys.float(), valid, moments, best, layout, at, total, quantizer)[0], best


def key_table_of_layout(
    keys: torch.Tensor,
    valid: torch.Tensor,
    moments: QueryMoments | None,
    number: int,
    layout: RotaryLayout,
    angles: Angles,
    total: int,
    quantizer: str = "lloyd-max",
) -> tuple[RowTable, torch.Tensor]:
    """The table of one layout, and the logarithm of the error to be expected, summed over heads."""
    share = valid.float() / valid.sum(dim=1, keepdim=True).clamp(min=1)
    keys = layout.rotate(keys, angles.cosines, -angles.sines)
    mean = torch.einsum("bhtd,bt->bhd", keys, share).clamp(-_LARGEST, _LARGEST).half()
    centred = keys - mean.float()[:, :, None]
    variance = torch.einsum("bhtd,bt->bhd", centred * centred, share)
    queried = 1.0 if moments is None else _turned_back(moments, number, layout, angles, share)
    # How keys vary that hardly do tells layouts apart, but says nothing of those to come
    distortions = QUANTIZERS[quantizer].distortions
    error = _allocate(variance * queried, total, distortions)[2]
    size = (mean.float().square() + variance).mean(dim=-1, keepdim=True)
    is_steady = variance.median(dim=-1, keepdim=True).values < _STEADY_KEYS * size
    # A channel that is constant among others that are not is exact, and has nothing to come
    least = torch.where(is_steady, _LEAST_OF_STEADY, torch.where(variance > 0, _LEAST_OF_CHANNEL, 0.0))
    variance = variance.maximum(least.square() * size)
    order, widths, _ = _allocate(variance * queried, total, distortions)
    table = RowTable(
        order=order.to(order_dtype(order.shape[-1])),
        mean=mean,
        deviation=_stored_deviation(variance.sqrt()),
        widths=widths.to(torch.uint8),
        row_size=1 + total,
        head_dim=keys.shape[3],
        is_weighted=True,
        quantizer=quantizer,
    )
    return table, error.clamp(min=torch.finfo(error.dtype).tiny).log().sum()


def _allocate(
    energy: torch.Tensor, total: int, distortions: tuple[float, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The order of channels of energies `[B, H, D]`, widths of their blocks, and the error `[B, H]` to be expected."""
    energy, order = energy.sort(dim=-1, descending=True)
    by_block = F.pad(energy, (0, -energy.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK)).sum(dim=-1)
    widths = allocate_widths(by_block, total, distortions)
    return order, widths, expected_distortion(by_block, widths, distortions)


def _stored_deviation(deviation: torch.Tensor) -> torch.Tensor:
    """Rounds deviations to float16; 0 stays 0, what is not 0 does not become it."""
    return torch.where(deviation > 0, deviation.clamp(_TINY, _LARGEST), 0).half()


def _turned_back(
    moments: QueryMoments, number: int, layout: RotaryLayout, angles: Angles, share: torch.Tensor
) -> torch.Tensor:
    """The mean squares `[B, H, D]` of the queries, turned back by the angles of the keys in turn; up to a factor."""
    cosines, sines = angles.cosines[:, 0], angles.sines[:, 0]
    squared_cosines, squared_sines, mixed = (
        torch.einsum("btd,bt->bd", part.expand(share.shape[0], -1, -1), share)[:, None]
        for part in (cosines * cosines, sines * sines, cosines * sines)
    )
    partners = moments.squares[..., layout.partners(share.device)]
    turned = moments.squares * squared_cosines + partners * squared_sines
    return (turned - 2 * moments.products[:, :, number] * mixed).clamp(min=0)


def steady_mean(states: torch.Tensor, valid: torch.Tensor) -> torch.Tensor | None:
    """
    The mean `[B, H, D]`, float16, of states `[B, H, T, D]` in heads that hardly vary, as where a prompt repeats one
    token: their errors are the same in all tokens, so that sums do not lose them. 0 in other heads, and `None` if
    there are only such.

    Args:
        states (`torch.Tensor` of shape `[B, H, T, D]`): keys or values, on a device that holds data.
        valid (`torch.Tensor` of shape `[B, T]`, bool): tokens that count.
    """
    share, states = valid.float() / valid.sum(dim=1, keepdim=True).clamp(min=1), states.float()
    mean = torch.einsum("bhtd,bt->bhd", states, share)
    varying = torch.einsum("bhtd,bt->bh", (states - mean[:, :, None]).square(), share)
    is_steady = varying < _STEADY_VALUES * torch.einsum("bhtd,bt->bh", states.square(), share)
    return (mean * is_steady[:, :, None]).clamp(-_LARGEST, _LARGEST).half() if bool(is_steady.any()) else None


def make_value_table(
    values: torch.Tensor,
    valid: torch.Tensor,
    total: int,
    quantizer: str = "lloyd-max",
    mean: torch.Tensor | None = None,
) -> RowTable:
    """
    The table of a prompt's rotated values `[B, H, T, D]`: one deviation a head, and bits alike for all channels.
    `mean` `[B, H, D]` is what was taken off before they were rotated.
    """
    batch_size, num_heads, _, head_dim = values.shape
    share = valid.float() / valid.sum(dim=1, keepdim=True).clamp(min=1)
    deviation = torch.einsum("bht,bt->bh", values.float().square().mean(dim=3), share).sqrt()
    if mean is not None:
        deviation = deviation.maximum(_LEAST_OF_STEADY * mean.float().square().mean(dim=2).sqrt())
    widths = torch.tensor(even_widths(head_dim, total), dtype=torch.uint8, device=values.device)
    return RowTable(
        order=None,
        mean=None,
        deviation=_stored_deviation(deviation)[:, :, None],
        widths=widths.expand(batch_size, num_heads, num_blocks(head_dim)).contiguous(),
        row_size=1 + total,
        head_dim=head_dim,
        is_weighted=False,
        quantizer=quantizer,
    )
