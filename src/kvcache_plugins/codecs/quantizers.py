"""How numbers of a row become codes and bytes: `"lloyd-max"`, one by one, or `"trellis"`, each with those before it.

A row is a head's token: first a byte that is its scale, then a block of eight channels after the other. A block of
width w is w bytes, and holds eight codes of w bits one after another, lowest bits first. All heads have rows of the
same size, so rows are one tensor, though blocks stand at other places in every head.

Codes stand for points: a point is an odd polynomial `c (a + b c^2 + e c^4)` of `c = (2 u + 1) / 2^n - 1`, of a number
`u` of n bits: two to five multiply-adds in registers and no table that has to be gathered from, on a CPU and on a GPU
alike.

Legend: B batch, H heads, T tokens, N blocks of eight channels, R bytes of a row.
"""

from abc import ABC, abstractmethod
from functools import cache

import torch


# Channels that share a width, so that a block of width w is w bytes
BLOCK = 8
MAX_WIDTH = 8
STATE_BITS = 8
NUM_STATES = 2**STATE_BITS
# Steps of the search for a trellis in what is `2^-width`, and where numbers end for it
SEARCH_STEPS = 8
SEARCH_END = 6.0
# More than any path costs
_NO_PATH = 2**40


def num_blocks(head_dim: int) -> int:
    """Blocks that the channels of a head take, the last one perhaps not full."""
    return -(-head_dim // BLOCK)


def block_offsets(widths: torch.Tensor) -> torch.Tensor:
    """The first byte of every block, `[B, H, N]`, of widths `[B, H, N]`."""
    widths = widths.long()
    return 1 + widths.cumsum(dim=-1) - widths


def _shifts(widths: torch.Tensor) -> torch.Tensor:
    """Where the codes of a block begin, in bits, `[B, H, 1, N, 8]`."""
    return (widths.long()[..., None] * torch.arange(BLOCK, dtype=torch.int64, device=widths.device))[:, :, None]


class Quantizer(ABC):
    """
    A quantizer of normal variables at the widths of blocks.

    Attributes:
        distortions (`tuple[float, ...]`): mean squared errors over a normal variable, at all widths from 0 on.
        coefficients (`tuple`): of the points' polynomials, by width.
        multipliers (`tuple[int, ...]`): by width, what states are multiplied by to be numbers of points.
        number_bits (`tuple[int, ...]`): bits of the number of a point, by width.
    """

    distortions: tuple[float, ...]
    coefficients: tuple[tuple[float, float, float], ...]
    multipliers: tuple[int, ...]
    number_bits: tuple[int, ...]

    @abstractmethod
    def quantize(self, normal: torch.Tensor, widths: torch.Tensor, is_weighted: bool) -> torch.Tensor:
        """
        Finds codes `[B, H, T, N, 8]`, int64, of numbers of variance 1, in blocks of `widths` `[B, H, N]` bits; errors
        count by `4^width` if it `is_weighted`.
        """

    @abstractmethod
    def points(self, codes: torch.Tensor, widths: torch.Tensor) -> torch.Tensor:
        """Looks up the numbers that codes `[B, H, T, N, 8]` stand for."""

    @abstractmethod
    def unpack(self, rows: torch.Tensor, widths: torch.Tensor) -> torch.Tensor:
        """The codes `[B, H, T, N, 8]`, int64, of rows; where there are no bits, any."""

    def pack(self, codes: torch.Tensor, scales: torch.Tensor, widths: torch.Tensor, row_size: int) -> torch.Tensor:
        """
        Makes rows `[B, H, T, R]`, uint8, of scales `[B, H, T, 1]`, uint8, and the newest bits of codes
        `[B, H, T, N, 8]`, as many as `widths` `[B, H, N]` say.
        """
        codes = codes & ((1 << widths.long()) - 1)[:, :, None, :, None]
        blocks = (codes << _shifts(widths)).sum(dim=-1)
        blocks_as_bytes = blocks.view(torch.uint8).unflatten(-1, (-1, BLOCK)).flatten(-2)
        # Byte r of a row is byte `r - offset` of the last block that begins at or before it
        places = torch.arange(1, row_size, dtype=torch.int64, device=codes.device)
        places = places.expand(*widths.shape[:2], -1).contiguous()
        offsets = block_offsets(widths)
        block = torch.searchsorted(offsets.contiguous(), places, right=True) - 1
        source = block * BLOCK + places - offsets.gather(-1, block)
        index = source[:, :, None].expand(-1, -1, codes.shape[2], -1)
        return torch.cat([scales, blocks_as_bytes.gather(3, index)], dim=3)

    def gains(self) -> torch.Tensor:
        """
        Computes gain corrections: factors of the points of every width that make them as large as what they stand for.
        A quantizer's points are means, which lie further in.
        """
        factors = [0.0] + [1 / (1 - distortion) for distortion in self.distortions[1:]]
        return torch.tensor(factors, dtype=torch.float32, device="cpu")

    def levels(self, width: int) -> torch.Tensor:
        """The points of all codes of a width, or of all states, `[2^bits]`, float32."""
        count = 2 ** self.number_bits[width]
        order = (torch.arange(count, dtype=torch.int64, device="cpu") * self.multipliers[width]) % count
        centred = (2 * order.double() + 1) / count - 1
        first, second, third = self.coefficients[width]
        square = centred * centred
        return (centred * (first + square * (second + square * third))).float()


class LloydMax(Quantizer):
    """
    Every number goes to its nearest point.

    The coefficients were fitted to the least squared error over a normal variable. Over Lloyd-Max's quantizers, which
    are the best there are, that is 0, 0, 0.2, 2.0, 1.2 and 3.2 % more at 1 to 6 bits; with two coefficients alone it
    would be 6 and 11 % at 5 and 6 bits.
    """

    distortions = (1.0, 0.36338, 0.11748, 0.034623, 0.0096878, 0.0025339, 0.00066493, 0.00017328, 0.000044952)
    coefficients = (
        (0.0, 0.0, 0.0),
        (1.595769, 0.0, 0.0),
        (1.785774, 0.40554, 0.0),
        (1.885821, 0.74143, 0.0),
        (1.924058, 1.073936, 0.0),
        (2.211255, -0.234025, 1.51223),
        (2.299583, -0.503396, 2.005214),
        (2.374041, -0.735169, 2.456839),
        (2.438726, -0.936702, 2.878641),
    )
    multipliers = (1,) * (MAX_WIDTH + 1)
    number_bits = tuple(range(MAX_WIDTH + 1))

    def quantize(self, normal: torch.Tensor, widths: torch.Tensor, is_weighted: bool) -> torch.Tensor:
        bounds = thresholds(normal.device)[widths.long()]
        by_block = normal.transpose(2, 3).flatten(3).contiguous()
        codes = torch.searchsorted(bounds, by_block)
        return codes.unflatten(3, (-1, normal.shape[4])).transpose(2, 3)

    def points(self, codes: torch.Tensor, widths: torch.Tensor) -> torch.Tensor:
        widths = widths.long()
        first, second, third = _coefficients(codes.device)[widths][:, :, None, :, None].unbind(-1)
        centred = (2 * codes + 1).float() * 0.5 ** widths.float()[:, :, None, :, None] - 1
        square = centred * centred
        return centred * (first + square * (second + square * third))

    def unpack(self, rows: torch.Tensor, widths: torch.Tensor) -> torch.Tensor:
        lanes = torch.arange(BLOCK, dtype=torch.int64, device=rows.device)
        places = block_offsets(widths)[..., None] + lanes
        in_block = lanes < widths[..., None]
        places = places.clamp(max=rows.shape[3] - 1).flatten(2)[:, :, None].expand(-1, -1, rows.shape[2], -1)
        blocks = rows.gather(3, places) * in_block.flatten(2)[:, :, None]
        blocks = blocks.unflatten(3, (-1, BLOCK)).contiguous().view(torch.int64)
        masks = (1 << widths.long()) - 1
        return (blocks >> _shifts(widths)) & masks[:, :, None, :, None]


@cache
def thresholds(device: torch.device) -> torch.Tensor:
    """
    The upper bounds of the codes of every width, `[9, 255]`, infinite behind the last but one code: a value's code is
    how many of them lie below it.
    """
    with torch.inference_mode(False):
        bounds = torch.full((MAX_WIDTH + 1, 2**MAX_WIDTH - 1), torch.inf, dtype=torch.float32, device="cpu")
        for width in range(1, MAX_WIDTH + 1):
            points = QUANTIZERS["lloyd-max"].levels(width)
            bounds[width, : len(points) - 1] = (points[1:] + points[:-1]) / 2
        return bounds.to(device)


@cache
def _coefficients(device: torch.device) -> torch.Tensor:
    """Makes a tensor `[9, 3]` of the coefficients of `LloydMax`."""
    with torch.inference_mode(False):
        return torch.tensor(LloydMax.coefficients, dtype=torch.float32, device=device)


class Trellis(Quantizer):
    """
    Trellis-coded quantization at 1 to 6 bits: a number's point depends on those coded before it.

    The codes of a row are one stream of bits. A number of width w brings w new bits, and its point belongs to the
    newest eight bits, the state: `state = (state << w | code) mod 256`, as in
    [QTIP](https://huggingface.co/papers/2406.11235). So all 256 points are in reach though a code has w bits, and a
    search (Viterbi's) finds the codes whose points are nearest together. To read a number one needs eight bits of the
    stream and nothing before them. What `quantize` and `unpack` return are states.

    The points are no table: of the state s, `p = (multiplier * s) mod 256` says which of 256 points in order it is. As
    multipliers are odd, states that differ in their old bits have other points. For every width the best of the 128
    was taken, and the coefficients fitted to least error by turns with the search. Of streams without end the mean
    squared errors over the Gaussian bound were measured as 1.22, 1.32 and 1.49 at 2, 3 and 4 bits.

    The stream begins at a row's end, with the last channel: what a state lacks there are the zeros that shifts bring
    in. Streams are as short as a row, so that every token stands for itself, and the first few numbers, which have few
    points to choose from, err by more: they are those of least energy. The last ones err by less, as nothing comes
    after them. Widths may change within a stream.

    The search counts in integers, so that it finds the same everywhere: numbers and points are rounded to an eighth of
    the widest step, or of each width's own where errors are weighted by `4^width`.
    """

    # In rows of 64 numbers of one width
    distortions = (1.0, 0.30744, 0.079745, 0.021296, 0.006152, 0.001663, 0.000474)
    coefficients = (
        (0.0, 0.0, 0.0),
        (1.5471, -1.0244, 1.4761),
        (1.588, -0.8709, 1.8148),
        (1.6494, -0.7901, 2.0149),
        (1.8206, -1.1379, 2.614),
        (2.0751, -1.0327, 2.6815),
        (2.2705, -0.7208, 2.4014),
    )
    multipliers = (1, 123, 69, 97, 175, 111, 161)
    number_bits = (STATE_BITS,) * 7

    def quantize(self, normal: torch.Tensor, widths: torch.Tensor, is_weighted: bool) -> torch.Tensor:
        by_head = normal.flatten(0, 1)
        states = torch.zeros(by_head.shape, dtype=torch.int64, device=normal.device)
        patterns, head_patterns = torch.unique(widths.long().flatten(0, 1), dim=0, return_inverse=True)
        for number, pattern in enumerate(patterns):
            heads = (head_patterns == number).nonzero().flatten()
            finest = pattern if is_weighted else pattern.amax().expand_as(pattern)
            factors = (SEARCH_STEPS << finest).float()
            numbers = (by_head[heads].clamp(-SEARCH_END, SEARCH_END) * factors[:, None]).round().long()
            found = _search(numbers.flatten(0, 1).flatten(1), pattern.tolist(), factors)
            states[heads] = found.unflatten(1, (-1, BLOCK)).unflatten(0, (len(heads), -1))
        return states.unflatten(0, normal.shape[:2])

    def points(self, codes: torch.Tensor, widths: torch.Tensor) -> torch.Tensor:
        starts = (widths.long() * NUM_STATES)[:, :, None, :, None]
        return state_points(codes.device).flatten()[codes + starts]

    def unpack(self, rows: torch.Tensor, widths: torch.Tensor) -> torch.Tensor:
        lanes = torch.arange(BLOCK, dtype=torch.int64, device=rows.device)
        bits = (8 * block_offsets(widths)[..., None] + lanes * widths.long()[..., None]).flatten(2)
        place = (bits >> 3)[:, :, None].expand(-1, -1, rows.shape[2], -1)
        padded = torch.cat([rows, rows.new_zeros(*rows.shape[:3], 2)], dim=3).long()
        words = padded.gather(3, place) | padded.gather(3, place + 1) << 8
        states = words >> (bits & 7)[:, :, None] & (NUM_STATES - 1)
        return states.unflatten(3, (-1, BLOCK))


@cache
def state_points(device: torch.device) -> torch.Tensor:
    """The points of all states of a trellis at every width, `[7, 256]`."""
    with torch.inference_mode(False):
        own = QUANTIZERS["trellis"]
        return torch.stack([own.levels(width) for width in range(len(own.distortions))]).to(device)


def _search(numbers: torch.Tensor, pattern: list[int], factors: torch.Tensor) -> torch.Tensor:
    """The states `[M, 8 N]` of M streams of integers `[M, 8 N]`; of equal paths the one of lower states."""
    grid = (state_points(numbers.device)[pattern] * factors[:, None]).round().long()
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
    numbers = torch.arange(costs.shape[1], dtype=torch.int64, device=costs.device).view(-1, *[1] * (costs.dim() - 2))
    least = (costs * NUM_STATES + numbers).amin(dim=1)
    return least // NUM_STATES, least % NUM_STATES


QUANTIZERS: dict[str, Quantizer] = {"lloyd-max": LloydMax(), "trellis": Trellis()}
