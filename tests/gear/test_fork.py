"""Caches that share a compressed prefix: each goes on as it would alone, and the prefix is held once."""

import copy

import pytest
import torch

from kvcache_plugins import GEARCache, measure_memory


OPTIONS = {"nbits": 2, "residual_length": 32, "q_group_size": 16}
NUM_DECODED = 111


def tokens(length, seed):
    return torch.randint(2, 128, (1, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def fill(model, cache, length=130):
    prefix = tokens(length, 0)
    model(prefix, past_key_values=cache)
    return prefix


@torch.no_grad()
def logits_of(model, cache, continuation):
    """One token after another, so that chunks are compressed on the way."""
    steps = [model(token[None], past_key_values=cache).logits for token in continuation.T]
    return torch.cat(steps, dim=1)


@pytest.mark.parametrize(
    ("architecture", "options"),
    [("llama", OPTIONS), ("gemma3-hybrid", OPTIONS), ("llama", {})],
    ids=["groups", "hybrid", "rows"],
)
def test_forks_go_on_as_copies_do(tiny_model, architecture, options):
    model = tiny_model(architecture)
    cache = GEARCache(model.config, **options)
    fill(model, cache)
    # Into a chunk, so that there are a buffer and decoded blocks with room for more, to be shared or not
    logits_of(model, cache, tokens(NUM_DECODED, 1))
    alone = [copy.deepcopy(cache) for _ in range(3)]
    forks = cache.fork(3)
    continuations = [tokens(50, seed) for seed in (2, 3, 4)]
    # In turn, so that one would write over another's tokens where they shared a buffer
    steps = [
        [logits_of(model, fork, each[:, [step]]) for fork, each in zip(forks, continuations, strict=True)]
        for step in range(50)
    ]
    for logits, single, continuation in zip(zip(*steps, strict=True), alone, continuations, strict=True):
        expected = logits_of(model, single, continuation)
        torch.testing.assert_close(torch.cat(logits, dim=1), expected, rtol=1e-4, atol=1e-4)
    assert [fork.get_seq_length() for fork in forks] == [130 + NUM_DECODED + 50] * 3
    # The one that was forked has seen nothing of it, and goes on too
    assert cache.get_seq_length() == 130 + NUM_DECODED
    again = copy.deepcopy(cache)
    expected = logits_of(model, again, continuations[0])
    torch.testing.assert_close(logits_of(model, cache, continuations[0]), expected)


@pytest.mark.parametrize("options", [OPTIONS, {}], ids=["groups", "rows"])
def test_the_prefix_is_held_once(tiny_model, options):
    model = tiny_model("llama")
    cache = GEARCache(model.config, **options)
    fill(model, cache, 1030)
    one = cache.memory().total_bytes
    forks = cache.fork(16)
    together = measure_memory([cache, *forks])
    assert together.total_bytes < 1.1 * one
    assert together.dense_bytes == 17 * cache.memory().dense_bytes
    assert measure_memory([cache, *(copy.deepcopy(cache) for _ in range(16))]).total_bytes == 17 * one
    for fork in forks:
        logits_of(model, fork, tokens(5, 7))
    own = [tensor for fork in forks for layer in fork.layers for tensor in layer.buffer.tensors()]
    assert measure_memory(forks).total_bytes == one + sum(tensor.nbytes for tensor in own)


def test_an_empty_cache_can_be_forked(tiny_model):
    model = tiny_model("llama")
    fork, other = GEARCache(model.config).fork(2)
    fill(model, fork)
    assert (fork.get_seq_length(), other.get_seq_length()) == (130, 0)


@pytest.mark.parametrize("count", [0, -1, 1.5, True, None])
def test_count_is_checked(count):
    with pytest.raises(ValueError, match="`count` has to be an integer of at least 1 but got"):
        GEARCache().fork(count)
