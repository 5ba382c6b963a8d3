"""Head dimensions of 8 to 256 and 1 to 8 query heads a key/value head: every cache, made as exact as it can be."""

from collections.abc import Callable

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from kvcache_plugins import create_cache
from kvcache_plugins.contract.comparison import distance


SHAPES = ((8, 1), (40, 3), (256, 8))
LONG_SHAPES = ((96, 3), (16, 3), (80, 8), (8, 8), (24, 2), (64, 8), (80, 1), (128, 2), (192, 1))
EIGHT_BITS = {"nbits": 8, "residual_length": 32}
EVERYTHING = {"full_layers": (), "alpha": float("inf"), "max_fetch_ratio": 1.0}
CACHES = {
    **dict.fromkeys(("gear-2bit", "kivi-2bit", "per-token-2bit", "kcvt-4bit"), EIGHT_BITS),
    "gear-k4v3": {"key_nbits": 8, "value_nbits": 8, "residual_length": 32},
    "transform-22": {"key_nbits": 8, "value_nbits": 8},
    "infinigen": EVERYTHING,
    "infinigen-paper": {"full_layers": (), "alpha": float("inf"), "max_fetch_ratio": 1.0},
    "infinigen-transform": {**EVERYTHING, "key_nbits": 8, "value_nbits": 8},
    "h2o": {"heavy_ratio": 0.5, "recent_ratio": 0.5},
    "turboquant-4bit": {"nbits": 8},
    "llamacpp-q8_0": {},
}
LIMIT = 0.05


@pytest.fixture
def make_model(tiny_model) -> Callable[[int, int], PreTrainedModel]:
    """A factory of models by their head dimension and their query heads for each of two key/value heads."""
    small = {"intermediate_size": 32, "num_key_value_heads": 2}
    return lambda head_dim, groups: tiny_model(
        "llama", **small, head_dim=head_dim, hidden_size=16 * groups, num_attention_heads=2 * groups
    )


@torch.no_grad()
def furthest(model: PreTrainedModel, cache: str, chunks: list[torch.Tensor]) -> float:
    """The largest distance of a forward's last logits from those over a dense cache."""
    made, dense = create_cache(cache, model, **CACHES[cache]), DynamicCache(config=model.config)
    pairs = ([model(ids, past_key_values=each).logits[:, -1:] for each in (made, dense)] for ids in chunks)
    return max(distance(*pair) for pair in pairs)


@pytest.mark.parametrize(
    "shape",
    [*SHAPES, *(pytest.param(shape, marks=pytest.mark.long) for shape in LONG_SHAPES)],
    ids=lambda shape: "D{}-G{}".format(*shape),
)
def test_all_head_dims_and_groups_attend_near_dense(shape: tuple[int, int], make_model) -> None:
    model = make_model(*shape)
    ids = torch.randint(1, 97, (2, 150))
    # A prompt, decoded tokens until a buffer of 32 has overflowed, several tokens, one more
    chunks = list(ids.split([70, *[1] * 34, 45, 1], dim=1))
    errors = {cache: furthest(model, cache, chunks) for cache in CACHES}
    assert max(errors.values()) < LIMIT, errors


@pytest.mark.parametrize("cache", CACHES)
def test_prompts_of_one_token_are_exact(cache: str, make_model) -> None:
    ids = torch.randint(1, 97, (2, 90))
    assert furthest(make_model(64, 2), cache, list(ids.split(1, dim=1))) < LIMIT
