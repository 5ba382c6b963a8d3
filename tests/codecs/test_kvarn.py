"""KVarN: equal to its published steps written out for one tile, keys that differ in size, bytes to the byte."""

import pytest
import torch

from kvcache_plugins import create_cache
from kvcache_plugins.codecs.rotation import hadamard_matrix
from kvcache_plugins.gear import GEARCache


NAMES = ("kvarn-k4v4", "kvarn-k4v3", "kvarn-k4v2", "kvarn-k2v2")
TILE, DIM = 128, 64


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


def filled(cache: GEARCache, keys: torch.Tensor, values: torch.Tensor) -> GEARCache:
    cache.update(keys, values, 0)
    cache.layers[0].settle_prompt()
    return cache


@pytest.mark.parametrize("name", NAMES)
def test_tiles_are_those_of_the_published_steps(name: str) -> None:
    states = {side: states_of(2, 3, 2 * TILE, DIM) for side in ("keys", "values")}
    cache = filled(create_cache(name), **states)
    for side, nbits in (("keys", int(name[7])), ("values", int(name[9]))):
        found = cache.layers[0].materialize(side).unflatten(2, (2, TILE))
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
    for backbone in ("kivi", "kvarn"):
        cache = filled(GEARCache(nbits=3, backbone=backbone, rank=0, sparsity=0.0, residual_length=TILE), keys, keys)
        errors.append((cache.layers[0].materialize("keys") - keys).norm())
    assert errors[1] < 0.85 * errors[0]


@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_a_tile_are_the_published_ones(name: str) -> None:
    cache = filled(create_cache(name), *(states_of(2, 3, 2 * TILE, DIM) for _ in range(2)))
    codes = TILE * DIM * (int(name[7]) + int(name[9])) // 8
    scales = 2 * (2 * DIM + TILE) + 2 * (DIM + 2 * TILE)
    memory = cache.memory()
    assert memory.total_bytes == 2 * 3 * 2 * (codes + scales) + memory.parts["index"]
    assert memory.parts["scales"] == 2 * 3 * 2 * scales


@torch.no_grad()
def test_a_padded_sequence_has_the_tiles_that_it_has_alone() -> None:
    """Checks exact sinks that take a part of the first tile, and decoded tiles, cropped or not, too."""
    states = states_of(2, 2, 4 * TILE, DIM)
    for sinks in (0, 110):
        caches = []
        for rows, first in (([0, 1], 0), ([1], TILE // 2 + 7)):
            own = states[rows, :, first : 2 * TILE + 40]
            mask = torch.ones(len(rows), own.shape[2], dtype=torch.long)
            if len(rows) == 2:
                mask[1, : TILE // 2 + 7] = 0
            options = {"num_sink_tokens": sinks, "attention_mask": mask}
            cache = filled(create_cache("kvarn-k4v4", **options), own, own)
            for start, stop in ((2 * TILE + 40, 3 * TILE + 41), (3 * TILE + 41, 3 * TILE + 42)):
                cache.update(states[rows, :, start:stop], states[rows, :, start:stop], 0)
            caches.append(cache)
        for removed in (0, 2 + TILE // 2):
            for cache in caches:
                cache.crop(-removed)
            for side in ("keys", "values"):
                both, alone = (cache.layers[0].materialize(side)[-1] for cache in caches)
                torch.testing.assert_close(both[:, -alone.shape[1] :], alone, atol=2e-2, rtol=1e-2)


@torch.no_grad()
def test_forks_and_files_go_on_alike(tiny_llama, tmp_path) -> None:
    cache = create_cache("kvarn-k4v3", tiny_llama)
    tokens = torch.randint(3, 128, (2, 2 * TILE + 30))
    for part in (tokens[:, : TILE + 20], tokens[:, TILE + 20 : -1], tokens[:, -1:]):
        tiny_llama(part, past_key_values=cache)
    assert cache.stats()["tokens_compressed"] > 0
    cache.save(tmp_path / "kvarn.safetensors", tiny_llama)
    caches = [cache.fork(1)[0], GEARCache.load(tmp_path / "kvarn.safetensors", tiny_llama), cache]
    step = torch.randint(3, 128, (2, 3))
    first, *others = (tiny_llama(step, past_key_values=each).logits for each in caches)
    assert all(torch.equal(each, first) for each in others)
