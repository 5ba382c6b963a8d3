"""Rows of one side of a layer as a stream of fewer bytes, for disks, and back, bit by bit the same.

    b"\\0" or b"\\1" | deflate( matrix, after b"\\1" | scales | codes of 1 bit | codes of 2 bits | ... )

Codes of one width stand together, token by token and as many in a byte as fit: frequent ones get few bits, and what is
alike in every layer for a token that comes again, as in the first one, is found again. After b"\\1" they are the
differences, modulo `2^width`, from what the layer below lets expect by a matrix that was fitted to these very tokens:

    points of the layer below, over the largest scale of their token -> times the matrix -> over the own scale
        -> code of the nearest point

So that every machine expects the same, these are integers, powers of two in float32, and single products of both. Sums
stay below 2^24: float32 has them exactly in whatever order they are added up.

Legend: H heads, T tokens, N blocks of eight channels, C = 8 H N channels, F channels below, R bytes of a row.
"""

import zlib
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvcache_plugins.triton_kernels.stored_format import SCALE_STEPS

from .quantizers import BLOCK, QUANTIZERS


# Bytes of rows that a byte of a stream may stand for: a small file cannot ask for much memory
MOST_RATIO = 64
# Steps of a point and of a number of a matrix in what is 1; both have eight bits
_POINT_STEPS, _MATRIX_STEPS, _MOST = 24, 32, 127
_MOST_CHANNELS = 2**24 // _MOST**2
# For every channel below: what a matrix saves of fewer tokens, it takes itself
_LEAST_TOKENS = 3
# Of a matrix's fit, in variances of a channel
_RIDGE = 0.05
# Differences of stored scales, and bits of a power of two
_MOST_STEPS, _POWER_BITS = 255, 22
# Bits in a byte of a stream are all of one code, or of as many as fit into it
_TOGETHER = {1: 8, 2: 4, 3: 2, 4: 2}
_PLAIN, _PREDICTED = b"\0", b"\1"

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Points:
    """
    Numbers that a layer's rows stand for, as the layer above is told of them: `numbers` `[T, C]`, integers in float32,
    over the largest scale of their token's heads, and these `scales` `[T, 1]` as they are stored.
    """

    numbers: Array
    scales: Array


@dataclass(frozen=True, eq=False)
class RowStreams:
    """Writes and reads rows of `row_size` bytes whose blocks have `widths` `[H, N]`, by `"lloyd-max"`."""

    widths: Array
    row_size: int

    def write(self, rows: torch.Tensor, below: Points | None) -> tuple[bytes | None, Points]:
        """
        Writes rows `[H, T, R]`, expected by the points `below` where that saves bytes, and returns their points too;
        `None` for what no stream can hold: rows that do not end with zeros, or that are too much alike.
        """
        rows = rows.cpu()
        bytes_of_rows = rows.numpy()
        scales = np.ascontiguousarray(bytes_of_rows[:, :, 0].T)
        codes = QUANTIZERS["lloyd-max"].unpack(rows[None], torch.from_numpy(self.widths)[None])[0]
        words = _words(codes.to(torch.uint8).transpose(0, 1).flatten(1, 2).numpy())
        stream = _PLAIN + _deflate([scales, *self._sections(words)])
        num_below = _MOST_CHANNELS + 1 if below is None else below.numbers.shape[1]
        if below is not None and num_below <= min(_MOST_CHANNELS, rows.shape[1] / _LEAST_TOKENS):
            matrix = self._fit(words, scales, below)
            left = self._shift(words, self._expect(matrix, scales, below), is_back=True)
            stream = min(stream, _PREDICTED + _deflate([matrix, scales, *self._sections(left)]), key=len)
        is_same = np.array_equal(self._pack(words, scales), bytes_of_rows)
        is_held = is_same and self._num_bytes(rows.shape[1]) <= MOST_RATIO * len(stream)
        return stream if is_held else None, self._points(words, scales)

    def read(self, stream: bytes, num_tokens: int, below: Points | None) -> tuple[torch.Tensor, Points]:
        """Reads rows `[H, T, R]` and their points; a `ValueError` for a stream, from anywhere, that has none such."""
        is_predicted, num_channels = stream[:1] == _PREDICTED, self.widths.size * BLOCK
        num_below = below.numbers.shape[1] if below is not None and is_predicted else 0
        if stream[:1] != _PLAIN and not 0 < num_below <= _MOST_CHANNELS:
            raise ValueError("it is of an unknown kind, or predicted by a layer below that has no such rows")
        size = self._num_bytes(num_tokens)
        if size > MOST_RATIO * len(stream):
            raise ValueError(f"its {len(stream)} bytes cannot hold {num_tokens} tokens")
        data = _inflate(stream, num_channels * num_below + size)
        matrix, scales, data = np.split(data, np.cumsum([num_channels * num_below, num_tokens * len(self.widths)]))
        scales = scales.reshape(num_tokens, -1)
        words = np.zeros((num_tokens, self.widths.size), np.uint64)
        for width, blocks in self._blocks.items():
            together = _TOGETHER.get(width, 1)
            count = BLOCK // together
            part, data = np.split(data, [num_tokens * len(blocks) * count])
            packed = part.view(f"<u{count}").astype(np.uint64).reshape(num_tokens, -1)
            words[:, blocks] = _spread(_spread(packed, 8, count, lane=8 * together), width, together)
        if below is not None and num_below:
            expected = self._expect(matrix.view(np.int8).reshape(num_channels, num_below), scales, below)
            words = self._shift(words, expected)
        return torch.from_numpy(self._pack(words, scales)), self._points(words, scales)

    @cached_property
    def _blocks(self) -> dict[int, Array]:
        """Numbers of the blocks of every width that there is."""
        widths = self.widths.reshape(-1)
        return {int(width): np.flatnonzero(widths == width) for width in np.unique(widths) if width}

    @cached_property
    def _places(self) -> list[tuple[int, int, slice]]:
        """Number, head and bytes of a row of every block."""
        ends = 1 + self.widths.cumsum(axis=1, dtype=int)
        starts = np.ndenumerate(ends - self.widths)
        return [(number, at[0], slice(start, ends[at])) for number, (at, start) in enumerate(starts)]

    def _num_bytes(self, num_tokens: int) -> int:
        """Bytes that a stream without a matrix is inflated to."""
        sizes = (len(blocks) * BLOCK // _TOGETHER.get(width, 1) for width, blocks in self._blocks.items())
        return num_tokens * (len(self.widths) + sum(sizes))

    def _pack(self, words: Array, scales: Array) -> Array:
        """Makes rows `[H, T, R]` of codes and of scales `[T, H]`: as `Quantizer.pack`, in half of its time."""
        rows = np.zeros((len(self.widths), len(words), self.row_size), np.uint8)
        rows[:, :, 0] = scales.T
        packed = np.empty_like(words)
        for width, blocks in self._blocks.items():
            packed[:, blocks] = _gather(words[:, blocks], width, BLOCK)
        lanes = _lanes(packed)
        for number, head, place in self._places:
            rows[head, :, place] = lanes[:, number, : place.stop - place.start]
        return rows

    def _sections(self, words: Array) -> list[Array]:
        """Codes of each width, as many in a byte as fit."""
        parts = ((words[:, blocks], width, _TOGETHER.get(width, 1)) for width, blocks in self._blocks.items())
        return [_lanes(_gather(*each))[:, :, :: each[2]] for each in parts]

    def _own_points(self, words: Array) -> Array:
        """Points `[T, H, 8 N]`, float32, over the scales of their own rows."""
        points = np.zeros_like(words)
        for width, blocks in self._blocks.items():
            points[:, blocks] = _look_up(_tables(width)[0], words[:, blocks])
        return _lanes(points).view(np.int8).reshape(len(words), len(self.widths), -1).astype(np.float32)

    def _points(self, words: Array, scales: Array) -> Points:
        largest = scales.max(axis=1, keepdims=True)
        numbers = self._own_points(words)
        numbers *= _powers(scales, largest)[:, :, None]
        return Points(np.rint(numbers, out=numbers).reshape(len(words), -1), largest)

    def _fit(self, words: Array, scales: Array, below: Points) -> Array:
        """Fits a matrix `[C, F]`, int8, which says what codes to expect."""
        points = self._own_points(words) * _powers(scales, below.scales).clip(max=4)[:, :, None]
        numbers = below.numbers
        moments = (numbers.T @ numbers).astype(np.float64)
        moments[np.diag_indices(len(moments))] += _RIDGE * len(numbers) * _POINT_STEPS**2
        fitted = np.linalg.solve(moments, numbers.T @ points.reshape(len(points), -1)).T
        return np.rint(fitted * _MATRIX_STEPS).clip(-_MOST, _MOST).astype(np.int8)

    def _expect(self, matrix: Array, scales: Array, below: Points) -> Array:
        """Points `[T, C]`, int8, that codes are expected near to."""
        sums = (below.numbers @ matrix.T.astype(np.float32)).reshape(*scales.shape, -1)
        sums *= (_powers(below.scales, scales) / _MATRIX_STEPS)[:, :, None]
        return np.rint(sums, out=sums).clip(-_MOST, _MOST, out=sums).astype(np.int8).reshape(len(sums), -1)

    def _shift(self, words: Array, expected: Array, *, is_back: bool = False) -> Array:
        """Adds the codes that are expected, from the middle one on, to codes, or takes them off."""
        shifted, by_block = np.zeros_like(words), _words(expected.view(np.uint8).reshape(len(words), -1, BLOCK))
        for width, blocks in self._blocks.items():
            offsets = _lanes(_look_up(_tables(width)[1], by_block[:, blocks]))
            codes = _lanes(words[:, blocks])
            codes = codes - offsets if is_back else codes + offsets
            shifted[:, blocks] = _words(codes & np.uint8(2**width - 1))
        return shifted


def _deflate(sections: list[Array]) -> bytes:
    # Every section has Huffman codes of its own; matches of few bytes would cost more than they save
    deflate = zlib.compressobj(4, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_FILTERED)
    parts = [deflate.compress(each.tobytes()) + deflate.flush(zlib.Z_SYNC_FLUSH) for each in sections]
    return b"".join([*parts, deflate.flush()])


def _inflate(stream: bytes, size: int) -> Array:
    inflate = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        # One byte more, at which the end is found
        data = inflate.decompress(memoryview(stream)[1:], size + 1)
    except zlib.error as error:
        raise ValueError(f"it is damaged: {error}") from error
    if len(data) != size or not inflate.eof or inflate.unused_data:
        raise ValueError(f"it does not hold {size} bytes")
    return np.frombuffer(data, np.uint8)


def _words(lanes: Array) -> Array:
    """Lanes `[..., 8]`, uint8, as words `[...]`, the first one lowest."""
    return np.ascontiguousarray(lanes).view("<u8")[..., 0]


def _lanes(words: Array) -> Array:
    return np.ascontiguousarray(words, "<u8")[..., None].view(np.uint8)


def _look_up(table: bytes, words: Array) -> Array:
    return np.frombuffer(_lanes(words).tobytes().translate(table), "<u8").reshape(words.shape)


def _gather(words: Array, width: int, together: int) -> Array:
    """Moves codes in the bytes of words together, `together` of them side by side."""
    step = 1
    while 2 * step <= together:
        low = _mask(step * width, 16 * step)
        words = words & low | (words & low << np.uint64(8 * step)) >> np.uint64(step * (8 - width))
        step *= 2
    return words


def _spread(words: Array, width: int, together: int, lane: int = 8) -> Array:
    """Undoes `_gather`: moves what is `together` of `width` bits to lanes of their own."""
    step = together // 2
    while step and lane > width:
        low = _mask(step * width, 2 * step * lane)
        words = words & low | (words & low << np.uint64(step * width)) << np.uint64(step * (lane - width))
        step //= 2
    return words


def _mask(count: int, unit: int) -> np.uint64:
    """The lowest `count` bits of every `unit` of a word."""
    return np.uint64(sum((2**count - 1) << start for start in range(0, 64, unit)))


def _powers(over: Array, under: Array) -> Array:
    """Two to the differences of stored scales, float32: the same bits on every machine."""
    return _all_powers()[over.astype(np.int16) - under + _MOST_STEPS]


@cache
def _all_powers() -> Array:
    steps, octave = np.arange(-_MOST_STEPS, _MOST_STEPS + 1), int(SCALE_STEPS)
    rounded = np.array([round(2 ** (_POWER_BITS + step / octave)) for step in range(octave)], np.float32)
    return np.ldexp(rounded[steps % octave], steps // octave - _POWER_BITS)


@cache
def _tables(width: int) -> tuple[bytes, bytes]:
    """Points of all codes, and of all points the codes nearest to them, over the middle one."""
    levels = QUANTIZERS["lloyd-max"].levels(width).double().numpy() * _POINT_STEPS
    points = np.zeros(256, np.int8)
    points[: len(levels)] = np.rint(levels)
    bounds = (levels[1:] + levels[:-1]) / 2
    codes = np.searchsorted(bounds, np.arange(256, dtype=np.uint8).view(np.int8)) - len(levels) // 2
    return points.tobytes(), codes.astype(np.uint8).tobytes()
