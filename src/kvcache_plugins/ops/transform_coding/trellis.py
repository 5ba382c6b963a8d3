"""Trellis-coded quantization of a normal variable at 1 to 6 bits: a number's point depends on those coded before it.

The codes of a row are one stream of bits. A number of width w brings w new bits, and its point belongs to the newest
eight bits, the state: `state = (state << w | code) mod 256`, as in [QTIP](https://huggingface.co/papers/2406.11235).
So all 256 points are in reach though a code has w bits, and a search (Viterbi's) finds the codes whose points are
nearest together. To read a number one needs eight bits of the stream and nothing before them.

The points are no table: of the state s, `p = (multiplier * s) mod 256` says which of 256 points in order it is, and
that one is an odd polynomial of `c = (2 p + 1) / 256 - 1`, the one of `codebooks` with other coefficients. As
multipliers are odd, states that differ in their old bits have other points. For every width the best of the 128 was
taken, and the coefficients fitted to least error by turns with the search. Of streams without end the mean squared
errors over the Gaussian bound were measured as 1.22, 1.32 and 1.49 at 2, 3 and 4 bits.

Rows are those of `packing`, and the stream begins at a row's end, with the last channel: what a state lacks there are
the zeros that shifts bring in. Streams are as short as a row, so that every token stands for itself, and the first few
numbers, which have few points to choose from, err by more: they are those of least energy. The last ones err by less,
as nothing comes after them. Widths may change within a stream.

The search counts in integers, so that it finds the same everywhere: numbers and points are rounded to an eighth of
the widest step, or of each width's own where errors are weighted by `4^width`.

Legend: B batch, H heads, T tokens, N blocks of eight channels, R bytes of a row.
"""

from functools import cache

import torch

from .allocation import BLOCK
from .packing import block_offsets, pack_rows


STATE_BITS = 8
NUM_STATES = 2**STATE_BITS
MAX_WIDTH = 6
# Of no bits, then of 1 to 6
MULTIPLIERS = (1, 123, 69, 97, 175, 111, 161)
COEFFICIENTS = (
    (0.0, 0.0, 0.0),
    (1.5471, -1.0244, 1.4761),
    (1.588, -0.8709, 1.8148),
    (1.6494, -0.7901, 2.0149),
    (1.8206, -1.1379, 2.614),
    (2.0751, -1.0327, 2.6815),
    (2.2705, -0.7208, 2.4014),
)
# Mean squared error over a normal variable of variance 1, in rows of 64 numbers of one width
DISTORTIONS = (1.0, 0.30744, 0.079745, 0.021296, 0.006152, 0.001663, 0.000474)
# Steps of the search in what is `2^-width`, and where numbers end for it
SEARCH_STEPS = 8
SEARCH_END = 6.0
# More than any path costs
_NO_PATH = 2**40


def points(width: int) -> torch.Tensor:
    """The points of all states at a width, `[256]`, float32."""
    order = (torch.arange(NUM_STATES) * MULTIPLIERS[width]) % NUM_STATES
    centred = (2 * order.double() + 1) / NUM_STATES - 1
    first, second, third = COEFFICIENTS[width]
    square = centred * centred
    return (centred * (first + square * (second + square * third))).float()


@cache
def all_points(device: torch.device) -> torch.Tensor:
    """Those of every width, `[7, 256]`."""
    with torch.inference_mode(False):
        return torch.stack([points(width) for width in range(MAX_WIDTH + 1)]).to(device)


def search_factors(widths: torch.Tensor, is_weighted: bool) -> torch.Tensor:
    """What numbers are multiplied by to be searched for, `[..., N]`, of widths `[..., N]`."""
    finest = widths.long() if is_weighted else widths.long().amax(dim=-1, keepdim=True).expand_as(widths)
    return (SEARCH_STEPS << finest).float()


def find_states(normal: torch.Tensor, widths: torch.Tensor, is_weighted: bool) -> torch.Tensor:
    """
    The states of the stream whose points are nearest.

    Args:
        normal (`torch.Tensor` of shape `[B, H, T, N, 8]`): numbers of variance 1.
        widths (`torch.Tensor` of shape `[B, H, N]`): bits of the blocks, at most 6.
        is_weighted (`bool`): whether errors count by `4^width`.

    Returns:
        `torch.Tensor` of shape `[B, H, T, N, 8]`, int64; 0 where there are no bits.
    """
    by_head = normal.flatten(0, 1)
    states = torch.zeros(by_head.shape, dtype=torch.int64, device=normal.device)
    patterns, head_patterns = torch.unique(widths.long().flatten(0, 1), dim=0, return_inverse=True)
    for number, pattern in enumerate(patterns):
        heads = (head_patterns == number).nonzero().flatten()
        factors = search_factors(pattern, is_weighted)
        numbers = (by_head[heads].clamp(-SEARCH_END, SEARCH_END) * factors[:, None]).round().long()
        found = _search(numbers.flatten(0, 1).flatten(1), pattern.tolist(), factors)
        states[heads] = found.unflatten(1, (-1, BLOCK)).unflatten(0, (len(heads), -1))
    return states.unflatten(0, normal.shape[:2])


def _search(numbers: torch.Tensor, pattern: list[int], factors: torch.Tensor) -> torch.Tensor:
    """The states `[M, 8 N]` of M streams of integers `[M, 8 N]`; of equal paths the one of lower states."""
    grid = (all_points(numbers.device)[pattern] * factors[:, None]).round().long()
    places = [place for place in reversed(range(numbers.shape[1])) if pattern[place // BLOCK] > 0]
    ahead = numbers.new_full((len(numbers), NUM_STATES), _NO_PATH)
    ahead[:, 0] = 0
    choices = []
    for place in places:
        width = pattern[place // BLOCK]
        # Paths that differ only in the bits that leave the state go on as one
        best, choice = _lowest(ahead.unflatten(1, (2**width, -1)))
        choices.append(choice.to(torch.uint8))
        ahead = best.repeat_interleave(2**width, dim=1)
        ahead = ahead + (numbers[:, place, None] - grid[place // BLOCK]).square()
    states = torch.zeros_like(numbers)
    state = _lowest(ahead)[1]
    for place, choice in zip(reversed(places), reversed(choices), strict=True):
        states[:, place] = state
        kept = state >> pattern[place // BLOCK]
        leaving = choice.gather(1, kept[:, None])[:, 0].long()
        state = kept | leaving << (STATE_BITS - pattern[place // BLOCK])
    return states


def _lowest(costs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The least of costs `[M, K, ...]` and its number, the first one of equals on every device."""
    numbers = torch.arange(costs.shape[1], device=costs.device).view(-1, *[1] * (costs.dim() - 2))
    least = (costs * NUM_STATES + numbers).amin(dim=1)
    return least // NUM_STATES, least % NUM_STATES


def points_of(states: torch.Tensor, widths: torch.Tensor) -> torch.Tensor:
    """The points of states `[B, H, T, N, 8]` at widths `[B, H, N]`."""
    starts = (widths.long() * NUM_STATES)[:, :, None, :, None]
    return all_points(states.device).flatten()[states + starts]


def pack_states(states: torch.Tensor, scales: torch.Tensor, widths: torch.Tensor, row_size: int) -> torch.Tensor:
    """Rows of bytes, of the newest bits of states; the arguments are those of `packing.pack_rows`."""
    codes = states & ((1 << widths.long()) - 1)[:, :, None, :, None]
    return pack_rows(codes, scales, widths, row_size)


def unpack_states(rows: torch.Tensor, widths: torch.Tensor) -> torch.Tensor:
    """The states `[B, H, T, N, 8]`, int64, of rows; where there are no bits, any."""
    lanes = torch.arange(BLOCK, device=rows.device)
    bits = (8 * block_offsets(widths)[..., None] + lanes * widths.long()[..., None]).flatten(2)
    place = (bits >> 3)[:, :, None].expand(-1, -1, rows.shape[2], -1)
    padded = torch.cat([rows, rows.new_zeros(*rows.shape[:3], 2)], dim=3).long()
    words = padded.gather(3, place) | padded.gather(3, place + 1) << 8
    states = words >> (bits & 7)[:, :, None] & (NUM_STATES - 1)
    return states.unflatten(3, (-1, BLOCK))
