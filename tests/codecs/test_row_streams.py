"""Rows as streams of fewer bytes: the same rows again, whatever they are, and nothing of a stream believed."""

import zlib

import numpy as np
import pytest
import torch

from kvcache_plugins.codecs.row_streams import MOST_RATIO, RowStreams


# Two heads; blocks of every width and of none
WIDTHS = np.array([[8, 7, 6, 5, 4, 3], [4, 3, 2, 1, 0, 0]], np.uint8)
ROW_SIZE = 1 + 33
PREDICTED = 1


def random_rows(num_tokens, seed=0):
    rows = torch.randint(0, 256, (2, num_tokens, ROW_SIZE), generator=torch.Generator().manual_seed(seed))
    rows[1, :, 1 + 10 :] = 0
    return rows.to(torch.uint8)


def normal_rows(num_tokens):
    """Rows of two layers, the second one's codes near to those of the first."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.randint(100, 140, (2, num_tokens, 1), generator=generator)
    lower = torch.randn(2, num_tokens, 24, generator=generator)
    upper = lower.flip(0) + 0.1 * torch.randn(2, num_tokens, 24, generator=generator)
    # Codes of four bits, two in a byte: steps of a quarter serve as well as any other
    found = []
    for numbers in (lower, upper):
        codes = (numbers / 2.0 ** ((scales - 120) / 16) * 4 + 8).floor().clamp(0, 15).long()
        packed = codes[:, :, ::2] | codes[:, :, 1::2] << 4
        found.append(torch.cat([scales, packed], dim=2).to(torch.uint8))
    return found, RowStreams(np.full((2, 3), 4, np.uint8), 13)


@pytest.mark.parametrize("num_tokens", [1, 300])
def test_any_rows_come_back(num_tokens):
    streams, rows = RowStreams(WIDTHS, ROW_SIZE), random_rows(num_tokens)
    stream, points = streams.write(rows, None)
    found, same = streams.read(stream, num_tokens, None)
    assert torch.equal(found, rows)
    assert np.array_equal(points.numbers, same.numbers) and np.array_equal(points.scales, same.scales)
    assert np.abs(points.numbers).max() <= 127


def test_what_the_layer_below_lets_expect_is_not_written_again():
    (lower, upper), streams = normal_rows(2000)
    _, below = streams.write(lower, None)
    alone, _ = streams.write(upper, None)
    stream, _ = streams.write(upper, below)
    assert stream[0] == PREDICTED and len(stream) < 0.8 * len(alone)
    found, _ = streams.read(stream, 2000, below)
    assert torch.equal(found, upper)


def test_it_is_the_same_in_whatever_order_sums_are_added_up():
    (lower, upper), streams = normal_rows(500)
    _, below = streams.write(lower, None)
    scales = np.ascontiguousarray(upper.numpy()[:, :, 0].T)
    matrix = np.full((48, 48), 127, np.int8)
    expected = streams._expect(matrix, scales, below)
    order = np.random.default_rng(0).permutation(48)
    other = type(below)(np.ascontiguousarray(below.numbers[:, order]), below.scales)
    assert np.array_equal(streams._expect(matrix, scales, other), expected)


def test_what_no_stream_holds_stays_rows():
    streams = RowStreams(WIDTHS, ROW_SIZE)
    rows = random_rows(50)
    rows[1, 7, -1] = 1
    assert streams.write(rows, None)[0] is None
    # So a small file cannot ask for much memory
    assert streams.write(torch.zeros(2, 20_000, ROW_SIZE, dtype=torch.uint8), None)[0] is None


def test_streams_from_anywhere_are_refused():
    streams, rows = RowStreams(WIDTHS, ROW_SIZE), random_rows(100)
    stream, _ = streams.write(rows, None)
    longest = MOST_RATIO * len(stream)
    for changed, count in [
        *((stream[:size], 100) for size in (0, 1, 2, len(stream) // 2, len(stream) - 1)),
        *((stream, number) for number in (0, 99, 101, longest, 2**40)),
        (stream + b"\0", 100),
        (b"\2" + stream[1:], 100),
        (b"\1" + stream[1:], 100),
        (b"\0" + zlib.compress(bytes(10_000_000)), 100),
    ]:
        with pytest.raises(ValueError, match="^it |^its "):
            streams.read(changed, count, None)
    _, below = streams.write(rows, None)
    with pytest.raises(ValueError, match="does not hold"):
        streams.read(b"\1" + stream[1:], 100, below)
