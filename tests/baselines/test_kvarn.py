"""KVarN: equal to its published steps written out for one tile, keys that differ in size, bytes to the byte."""

import copy

import pytest
import torch
from transformers import Cache

from kvcache_plugins import GEARCache, create_cache
from kvcache_plugins.baselines import KVarNCache
from kvcache_plugins.formats.hadamard import hadamard_matrix


NAMES = ("kvarn-k4v4", "kvarn-k4v3", "kvarn-k4v2", "kvarn-k2v2")
TILE, DIM = 128, 128


def states_of(*shape: int) -> torch.Tensor:
    """Tokens and channels of different size, and channels that are off zero."""
    numbers = torch.randn(shape) * torch.linspace(0.3, 6, shape[-1]) + torch.linspace(-3, 3, shape[-1])
    return numbers * torch.rand(*shape[:-1], 1).exp().square()


def published(tile: torch.Tensor, nbits: int, side: str) -> torch.Tensor:
    """Codes and decodes one tile `[tokens, D]` as the paper's implementation does, float32 but for what is stored."""
    rotation = hadamard_matrix(tile.shape[1], tile.device)
    # Rows have the quantizer's scales: channels of keys, tokens of values
    rows = (tile @ rotation).T if side == "keys" else tile @ rotation
    column, row = torch.zeros(1, rows.shape[1]), torch.zeros(rows.shape[0], 1)

    def spread(numbers: torch.Tensor) -> torch.Tensor:
        stds = numbers.std(dim=0), numbers.std(dim=1)
        return sum((std.max() / std.min().clamp(min=1e-8) for std in stds), torch.zeros(()))

    best, columns, own = spread(rows), column.exp(), row.exp()
    for _ in range(16):
        column = (column + (rows / column.exp() / row.exp()).std(0, keepdim=True).clamp(1e-3, 1e3).log()).clamp(
            -0.3, 10
        )
        row = (row + (rows / column.exp() / row.exp()).std(1, keepdim=True).clamp(1e-3, 1e3).log()).clamp(-0.3, 10)
        found = spread(rows / column.exp() / row.exp())
        if found <= best:
            best, columns, own = found, column.exp(), row.exp()
    balanced = rows / columns / own
    least = balanced.amin(1, keepdim=True)
    step = (balanced.amax(1, keepdim=True) - least) / (2**nbits - 1)
    codes = ((balanced - least) / step).round().clamp(0, 2**nbits - 1)
    decoded = (codes * (own * step).half().float() + (own * least).half().float()) * columns.half().float()
    return (decoded.T if side == "keys" else decoded) @ rotation


def filled(cache: Cache, keys: torch.Tensor, values: torch.Tensor) -> Cache:
    cache.update(keys, values, 0)
    cache.layers[0].commit_prompt()
    return cache


@pytest.mark.parametrize("name", NAMES)
def test_tiles_equal_the_published_steps(name: str) -> None:
    states = {side: states_of(2, 3, 2 * TILE, DIM) for side in ("keys", "values")}
    cache = filled(create_cache(name), **states)
    for side, nbits in (("keys", int(name[7])), ("values", int(name[9]))):
        found = cache.layers[0].to_dense(side).unflatten(2, (2, TILE))
        wanted = states[side].unflatten(2, (2, TILE))
        for place in torch.cartesian_prod(*(torch.arange(size) for size in (2, 3, 2))):
            at = tuple(place.tolist())
            expected = published(wanted[at], nbits, side)
            error = (expected - wanted[at]).norm()
            # At the border of two codes a number may have the other one: of one in 200 that is .25 of all errors
            assert (found[at] - expected).norm() < 0.25 * error
            assert float((found[at] - wanted[at]).norm()) == pytest.approx(float(error), rel=0.005)


def test_normalization_lowers_errors_of_keys_whose_tokens_differ_in_size() -> None:
    """A channel's range over a tile is that of its largest tokens; values have a scale a token anyway."""
    keys, errors = states_of(1, 2, 4 * TILE, DIM), []
    plain = GEARCache(nbits=3, backbone="kivi", q_group_size=TILE, rank=0, sparsity=0.0, residual_length=TILE)
    for cache in (plain, KVarNCache(key_nbits=3, value_nbits=3)):
        filled(cache, keys, keys)
        errors.append((cache.layers[0].to_dense("keys") - keys).norm())
    assert errors[1] < 0.85 * errors[0]


@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_a_tile_equal_the_published_ones(name: str) -> None:
    cache = filled(create_cache(name), *(states_of(2, 3, 2 * TILE, DIM) for _ in range(2)))
    codes = TILE * DIM * (int(name[7]) + int(name[9])) // 8
    scales = 2 * (2 * DIM + TILE) + 2 * (DIM + 2 * TILE)
    memory = cache.memory()
    assert memory.total_bytes == 2 * 3 * 2 * (codes + scales) + memory.parts["index"]
    assert memory.parts["scales"] == 2 * 3 * 2 * scales


@torch.no_grad()
def test_padded_sequence_has_the_tiles_it_has_alone() -> None:
    """Decoded tiles, cropped or not, too."""
    states, caches, pad = states_of(2, 2, 4 * TILE, DIM), [], TILE // 2 + 7
    for rows, first in (([0, 1], 0), ([1], pad)):
        own = states[rows, :, first : 2 * TILE + 40]
        cache = create_cache("kvarn-k4v4")
        layer = cache._layer(0)
        cache.layers.append(layer)
        layer.load_prompt(own, own, torch.tensor([0, pad]) if len(rows) == 2 else None)
        for start, stop in ((2 * TILE + 40, 3 * TILE + 41), (3 * TILE + 41, 3 * TILE + 42)):
            cache.update(states[rows, :, start:stop], states[rows, :, start:stop], 0)
        caches.append(cache)
    for removed in (0, 2 + TILE // 2):
        for cache in caches:
            cache.crop(-removed)
        for side in ("keys", "values"):
            both, alone = (cache.layers[0].to_dense(side)[-1] for cache in caches)
            torch.testing.assert_close(both[:, -alone.shape[1] :], alone, atol=2e-2, rtol=1e-2)


@torch.no_grad()
def test_copies_continue_alike(tiny_llama) -> None:
    cache = create_cache("kvarn-k4v3", tiny_llama)
    tokens = torch.randint(3, 128, (2, 2 * TILE + 30))
    for part in (tokens[:, : TILE + 20], tokens[:, TILE + 20 : -1], tokens[:, -1:]):
        tiny_llama(part, past_key_values=cache)
    assert cache.stats()["tokens_compressed"] > 0
    step = torch.randint(3, 128, (2, 3))
    first, second = (tiny_llama(step, past_key_values=each).logits for each in (copy.deepcopy(cache), cache))
    assert torch.equal(first, second)
