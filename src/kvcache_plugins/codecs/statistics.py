"""Tables made of a prompt: statistics of its keys and values, and of the queries that asked for them.

The energy of a channel of keys is its variance, which is what is left to code, times the mean square of the queries at
that channel, which is what an error there does to a score. Both are taken before the rotary embedding, as if every
query had been turned back by the angles of all keys in turn.

Legend: B batch, H key/value heads, G query heads a key/value head, T tokens, Q queries, D head dim, C layouts.
"""

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from .allocation import BLOCK, allocate_widths, even_widths, expected_distortion, num_blocks
from .codec import Positions, QueryMoments
from .quantizers import QUANTIZERS
from .rope import RotaryLayout, apply_rope, channels_of
from .rows import RowTable, order_dtype


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
# By how much the logarithm of the error has to be less than the first layout's for another one
_LEAST_GAIN = 0.05


def make_key_table(
    keys: torch.Tensor,
    valid: torch.Tensor,
    moments: QueryMoments | None,
    layouts: Sequence[RotaryLayout],
    positions: Positions,
    total: int,
    quantizer: str = "lloyd-max",
) -> RowTable:
    """
    Makes the table of a prompt's keys, of the layout that they have: the one of the least error to be expected, if
    that is clearly less than the first one's.

    Args:
        keys (`torch.Tensor` of shape `[B, H, T, D]`): keys, after the rotary embedding.
        valid (`torch.Tensor` of shape `[B, T]`, bool): tokens that count.
        moments (`QueryMoments`, *optional*): of queries; without them all channels count the same.
        layouts (`Sequence[RotaryLayout]`): candidates.
        positions (`Positions`): of the tokens.
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
            at = positions.after(count - num_newest)
            table = key_table_of_layout(newest, counting, moments, number, layout, at, total, quantizer)
            logarithms.append(table[1])
        # Where it makes no difference the first is taken, so that sequences do not choose for each other
        errors = torch.stack(logarithms) / (keys.shape[0] * keys.shape[1])
        errors[1:] += _LEAST_GAIN
        best = int(errors.argmin())
    return key_table_of_layout(keys.float(), valid, moments, best, layouts[best], positions, total, quantizer)[0]


def key_table_of_layout(
    keys: torch.Tensor,
    valid: torch.Tensor,
    moments: QueryMoments | None,
    number: int,
    layout: RotaryLayout,
    positions: Positions,
    total: int,
    quantizer: str = "lloyd-max",
) -> tuple[RowTable, torch.Tensor]:
    """The table of one layout, and the logarithm of the error to be expected, summed over heads."""
    share = valid.float() / valid.sum(dim=1, keepdim=True).clamp(min=1)
    angles = layout.angles(positions.of(keys.shape[2], keys.device))
    cosines, sines = angles[0][:, None], angles[1][:, None]
    keys = layout.rotate(keys, cosines, -sines)
    mean = torch.einsum("bhtd,bt->bhd", keys, share).clamp(-_LARGEST, _LARGEST).half()
    centred = keys - mean.float()[:, :, None]
    variance = torch.einsum("bhtd,bt->bhd", centred * centred, share)
    queried = 1.0 if moments is None else _queries_at_keys(moments, number, layout, angles, share)
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
        rope=layout,
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


def _queries_at_keys(
    moments: QueryMoments,
    number: int,
    layout: RotaryLayout,
    angles: tuple[torch.Tensor, torch.Tensor],
    share: torch.Tensor,
) -> torch.Tensor:
    """Mean squares `[B, H, D]` of queries with the RoPE of keys undone, averaged over keys; up to a factor."""
    cosines, sines = angles
    means = []
    for part in (cosines * cosines, sines * sines, cosines * sines):
        means.append(torch.einsum("btd,bt->bd", part.expand(share.shape[0], -1, -1), share)[:, None])
    squared_cosines, squared_sines, mixed = means
    partners = moments.squares[..., channels_of(layout, share.device)[0]]
    turned = moments.squares * squared_cosines + partners * squared_sines
    return (turned - 2 * moments.products[:, :, number] * mixed).clamp(min=0)


def make_value_table(values: torch.Tensor, valid: torch.Tensor, total: int, quantizer: str = "lloyd-max") -> RowTable:
    """
    Makes the table of a prompt's values `[B, H, T, D]`: one deviation a head, and bits alike for all channels.

    Heads that hardly vary, as where a prompt repeats one token, have a mean: their errors are the same in all tokens,
    so that sums do not lose them. It is 0 in other heads, and `None` if there are only such.
    """
    batch_size, num_heads, _, head_dim = values.shape
    share, values = valid.float() / valid.sum(dim=1, keepdim=True).clamp(min=1), values.float()
    # Rotated, as they are coded, they are as large
    energy, stored_mean = torch.einsum("bht,bt->bh", values.square().mean(dim=3), share), None
    if not values.is_meta:
        mean = torch.einsum("bhtd,bt->bhd", values, share)
        varying = torch.einsum("bht,bt->bh", (values - mean[:, :, None]).square_().mean(dim=3), share)
        is_steady = varying < _STEADY_VALUES * energy
        if bool(is_steady.any()):
            stored_mean = (mean * is_steady[:, :, None]).clamp(-_LARGEST, _LARGEST).half()
            values = values - stored_mean.float()[:, :, None]
            energy = torch.einsum("bht,bt->bh", values.square().mean(dim=3), share)
    deviation = energy.sqrt()
    if stored_mean is not None:
        deviation = deviation.maximum(_LEAST_OF_STEADY * stored_mean.float().square().mean(dim=2).sqrt())
    widths = torch.tensor(even_widths(head_dim, total), dtype=torch.uint8, device=values.device)
    return RowTable(
        order=None,
        mean=stored_mean,
        deviation=_stored_deviation(deviation)[:, :, None],
        widths=widths.expand(batch_size, num_heads, num_blocks(head_dim)).contiguous(),
        row_size=1 + total,
        head_dim=head_dim,
        is_weighted=False,
        is_rotated=True,
        quantizer=quantizer,
    )


def shared_errors(
    tables: tuple[RowTable, RowTable],
    rows: tuple[torch.Tensor, torch.Tensor],
    keys: torch.Tensor,
    values: torch.Tensor,
    valid: torch.Tensor | None,
    positions: Positions,
) -> tuple[RowTable, RowTable]:
    """
    Adds to means the errors that all tokens of a prompt have in common, in heads where these are a large share of
    all errors: a prompt of few distinct tokens has few distinct errors, which attention cannot average.

    Args:
        tables (two `RowTable`): what made the rows, themselves made of these tokens.
        rows (two `torch.Tensor` of shape `[B, H, T, R]`): of keys and of values.
        keys, values (`torch.Tensor` of shape `[B, H, T, D]`): what they were made of.
        valid (`torch.Tensor` of shape `[B, T]`, bool, *optional*): tokens that count, all by default.
        positions (`Positions`): of the tokens.
    """
    key_table, value_table = tables
    tail = max(keys.shape[2] - _NUM_NEWEST, 0)
    counts = keys.new_ones(keys.shape[0], keys.shape[2], dtype=torch.float32) if valid is None else valid.float()
    share = counts[:, tail:] / counts[:, tail:].sum(dim=1, keepdim=True).clamp(min=1)
    assert key_table.mean is not None and key_table.rope is not None
    # What keys are before their rotary embedding is what their mean is added to
    exact = apply_rope(keys[:, :, tail:].float(), key_table.rope, positions.after(tail), is_undone=True)
    key_error = exact - key_table.decode(rows[0][:, :, tail:], None)
    value_error = values[:, :, tail:].float() - value_table.decode(rows[1][:, :, tail:])
    key_mean, value_mean = (
        _with_shared_error(key_table.mean, key_error, share),
        _with_shared_error(value_table.mean, value_error, share),
    )
    return dataclasses.replace(key_table, mean=key_mean), dataclasses.replace(value_table, mean=value_mean)


def _with_shared_error(mean: torch.Tensor | None, errors: torch.Tensor, share: torch.Tensor) -> torch.Tensor | None:
    """Adds to a mean `[B, H, D]` that of errors `[B, H, T, D]`, in heads where it is much of them."""
    shared = torch.einsum("bhtd,bt->bhd", errors, share)
    energy = torch.einsum("bhtd,bt->bh", errors.square(), share)
    shared = shared * (shared.square().sum(dim=2) > _LEAST_SHARED * energy)[:, :, None]
    if mean is None and not bool((shared != 0).any()):
        return None
    return (shared if mean is None else mean.float() + shared).clamp(-_LARGEST, _LARGEST).half()
