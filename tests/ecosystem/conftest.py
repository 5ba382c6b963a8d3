"""Shared fixtures: caches for a tiny model, lossy and exact, and greedy generation."""

import warnings
from collections.abc import Callable

import pytest
import torch
from transformers import Cache, DynamicCache

from kvcache_plugins import create_cache


LENGTH = 100
# The model has two layers, and `infinigen` would keep the first one whole
LOSSY: dict[str, dict[str, object]] = {"gear-2bit": {}, "infinigen": {"full_layers": (), "speculate": True}, "h2o": {}}


@pytest.fixture(params=LOSSY)
def cache_name(request: pytest.FixtureRequest) -> str:
    """The caches that are tried, by name."""
    return request.param


@pytest.fixture
def make_cache() -> Callable[..., Cache]:
    """`make_cache(name, model)`: a cache that compresses, or chooses among, the tokens of a prompt of `LENGTH`."""

    def make(name: str, model: torch.nn.Module) -> Cache:
        return create_cache(name, model, **LOSSY[name])

    return make


@pytest.fixture
def make_any() -> Callable[..., Cache]:
    """`make_any(name, model)`: a cache by name without warnings; tests that cannot have it are skipped."""

    def make(name: str, model: torch.nn.Module) -> Cache:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return create_cache(name, model)
            except (ValueError, ImportError) as error:
                pytest.skip(f"this model or machine cannot have it: {error}")

    return make


@pytest.fixture
def prompt() -> Callable[..., torch.Tensor]:
    """`prompt(length, num_rows, seed)`: random tokens `[num_rows, length]`."""

    def make(length: int = LENGTH, num_rows: int = 1, seed: int = 0) -> torch.Tensor:
        return torch.randint(1, 128, (num_rows, length), generator=torch.Generator().manual_seed(seed))

    return make


@pytest.fixture
def generate() -> Callable[..., torch.Tensor]:
    """`generate(model, input_ids, cache)`: the new tokens `[num_rows, 8]`, greedily; `None` is a `DynamicCache`."""

    def run(
        model: torch.nn.Module, input_ids: torch.Tensor, cache: Cache | None = None, **options: object
    ) -> torch.Tensor:
        cache = DynamicCache(config=model.config) if cache is None else cache
        options = {"max_new_tokens": 8, "do_sample": False, **options}
        output = model.generate(input_ids=input_ids, past_key_values=cache, **options)
        return output[:, input_ids.shape[1] :]

    return run
