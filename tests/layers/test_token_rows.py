"""Rows of tokens with room to grow."""

import pytest
import torch

from kvcache_plugins.layers.token_rows import TokenRows


def make_rows(count: int, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of both sides, of different sizes, whose bytes tell the token."""
    tokens = torch.arange(first, first + count, dtype=torch.uint8)[None, None, :, None]
    return tokens.expand(2, 3, -1, 5).clone(), tokens.expand(2, 3, -1, 4).clone() + 1


def check(rows: TokenRows, count: int) -> None:
    assert rows.length == count
    for stored, own in zip((rows.keys, rows.values), make_rows(count), strict=True):
        assert torch.equal(stored[:, :, :count], own)


def test_what_is_appended_follows_and_room_grows_little():
    rows = TokenRows(*make_rows(128), 128)
    rows.append(*make_rows(1, 128))
    assert rows.keys.shape[2] == rows.values.shape[2] == 130
    rows.append(*make_rows(1, 129))
    assert rows.keys.shape[2] == 130
    check(rows, 130)


@pytest.mark.parametrize(("most", "capacity"), [(129, 129), (100, 129), (500, 130)])
def test_room_beyond_the_most_is_not_made_before_it_is_needed(most, capacity):
    rows = TokenRows(*make_rows(128), 128)
    rows.append(*make_rows(1, 128), most)
    assert rows.keys.shape[2] == capacity
    check(rows, 129)


def test_resized_and_mapped():
    rows = TokenRows(*make_rows(20), 20)
    rows.resize(7)
    assert rows.keys.shape[2] == 7
    check(rows, 7)
    rows.resize(9)
    assert rows.values.shape[2] == 9
    check(rows, 7)
    rows.map(lambda tensor: tensor[:1])
    assert rows.keys.shape == (1, 3, 9, 5) and rows.values.shape == (1, 3, 9, 4)
