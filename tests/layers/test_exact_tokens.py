"""An unwritten token is in the tail for every reader."""

import copy

import pytest
import torch

from kvcache_plugins.layers.exact_tokens import ExactTail


HEADS, DIM, HELD, LIMIT = 2, 5, 3, 20
DOORS = {
    "keys and values": lambda buffer: (buffer.keys, buffer.values),
    "tensors": lambda buffer: tuple(states[:, :, : buffer.length] for states in buffer.tensors()),
    "append": lambda buffer: (buffer.append(*tokens(2, seed=7)), buffer.keys, buffer.values),
    "append_exactly": lambda buffer: buffer.append_exactly(*tokens(1, seed=8)),
    "drop_first": lambda buffer: (buffer.drop_first(2), buffer.keys, buffer.values),
    "drop_last": lambda buffer: (buffer.drop_last(1), buffer.append(*tokens(1, seed=6)), buffer.keys, buffer.values),
    "map": lambda buffer: (buffer.map(lambda states: states.repeat(2, 1, 1, 1)), buffer.keys, buffer.values),
    "a copy": lambda buffer: (lambda copied: (copied.keys, copied.values))(copy.deepcopy(buffer)),
}


def tokens(count, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, HEADS, count, DIM, generator=generator).to(dtype) for _ in range(2)]


def make_buffer():
    buffer = ExactTail(*(states[:, :, :0] for states in tokens(1, seed=0)), LIMIT)
    buffer.append(*tokens(HELD, seed=1))
    return buffer


def results(door, buffer):
    return [each for each in door(buffer) if each is not None]


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_an_unwritten_token_is_seen_by_every_reader(door):
    buffer, reference = make_buffer(), make_buffer()
    # The state that an update leaves
    assert buffer.unwritten is None and buffer.length < buffer.capacity
    buffer.unwritten, buffer.length = tokens(1, seed=2), buffer.length + 1
    reference.append(*tokens(1, seed=2))
    assert buffer.unwritten is not None and buffer.length == reference.length == HELD + 1
    for found, expected in zip(results(door, buffer), results(door, reference), strict=True):
        assert torch.equal(found, expected)
