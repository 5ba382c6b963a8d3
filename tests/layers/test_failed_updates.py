"""Updates, crops and changes of the batch that run out of memory: a layer is as it was before, wherever memory ended.

Each operation of PyTorch that the package makes meanwhile fails once, in turn, as an allocation would.
"""

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Cache, PreTrainedModel

import kvcache_plugins
from kvcache_plugins import create_cache
from kvcache_plugins.layers.lazy_layer import LazyLayer


SOURCES = str(Path(kvcache_plugins.__file__).parent)
CACHES = ["transform", "gear-4bit:residual_length=16", "infinigen:recent=8", "infinigen-transform:recent=8", "h2o"]
# Tokens of the updates before the one that fails, and of that one; among many single ones is a step that packs tokens
CASES = {"prompt": ([], 100), "step": ([100, *[1] * 40], 1), "chunk": ([90, 3], 60), "later-fit": ([70, 1], 230)}
# Calls that change what is stored
CHANGES: dict[str, Callable[[Cache], object]] = {
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    "crop": lambda cache: cache.crop(-20),
}
# Tokens of the updates behind it
AFTER = (1, 1, 8)
# Operations that fail, at most, spread evenly; the last one always does
MOST_FAILURES = 20


class FailingOperations(TorchDispatchMode):
    """Counts operations that the package makes; operation `number` fails with an error, if there is one."""

    def __init__(self, number: int | None = None, error: type[BaseException] = torch.OutOfMemoryError):
        super().__init__()
        self.number = number
        self.error = error
        self.count = 0

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        frame = sys._getframe(1)
        while frame is not None and not frame.f_code.co_filename.startswith(SOURCES):
            frame = frame.f_back
        if frame is not None:
            self.count += 1
            if self.count == self.number:
                raise self.error("planted")
        return function(*args, **(kwargs or {}))


@pytest.fixture
def one_layer(tiny_model) -> PreTrainedModel:
    return tiny_model("llama", num_hidden_layers=1)


def feed(model: PreTrainedModel, cache: Cache, ids: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Reads the tokens behind those of the cache; returns all logits."""
    start, logits = cache.get_seq_length(), []
    for length in lengths:
        logits.append(model(ids[:, start : start + length], past_key_values=cache).logits)
        start += length
    return torch.cat(logits, dim=1)


def longest_step(model: PreTrainedModel, name: str, ids: torch.Tensor, before: list[int]) -> list[int]:
    """Shortens updates to those before the step of most operations, which packs tokens."""
    cache, counts = create_cache(name, model), []
    for length in before:
        with FailingOperations() as operations:
            feed(model, cache, ids, [length])
        counts.append(operations.count if length == 1 else 0)
    return before[: counts.index(max(counts))]


def check_failures(
    model: PreTrainedModel, ids: torch.Tensor, name: str, case: str, error: type[BaseException]
) -> None:
    """Fails operations of an update in turn, and compares what follows with a cache in which none failed."""
    before, length = CASES[case]
    if case == "step":
        before = longest_step(model, name, ids, before)

    def read_before() -> Cache:
        cache = create_cache(name, model)
        if before:
            feed(model, cache, ids, before)
        return cache

    expected = feed(model, read_before(), ids, [length, *AFTER])
    for _ in range(2):
        # The first time makes constants that all layers share
        cache = read_before()
        with FailingOperations() as operations:
            feed(model, cache, ids, [length])
    assert operations.count > 10
    for number in range(operations.count, 0, -max(operations.count // MOST_FAILURES, 1)):
        cache = read_before()
        with pytest.raises((error, MemoryError)), FailingOperations(number, error):
            feed(model, cache, ids, [length])
        if cache.get_seq_length() > sum(before):
            cache.crop(-length)
        got = feed(model, cache, ids, [length, *AFTER])
        torch.testing.assert_close(got, expected, msg=lambda text, number=number: f"operation {number}: {text}")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", CACHES)
@torch.no_grad()
def test_layer_without_memory_is_as_before(one_layer, random_windows, name, case):
    if (name, case) == ("h2o", "later-fit"):
        pytest.skip("H2O takes back the weights of its newest queries alone")
    check_failures(one_layer, torch.stack(random_windows(2, 320)), name, case, torch.OutOfMemoryError)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_interrupted_layer_is_as_before(one_layer, random_windows, case):
    check_failures(one_layer, torch.stack(random_windows(2, 320)), "transform", case, KeyboardInterrupt)


@pytest.mark.parametrize("name", ["infinigen:recent=8,pool_tokens=40", "infinigen-transform:recent=8,pool_tokens=40"])
@torch.no_grad()
def test_crop_without_memory_changes_nothing(one_layer, random_windows, name):
    """Tokens that were evicted for others leave slots to free."""
    ids = torch.stack(random_windows(2, 320))

    def read_before() -> Cache:
        cache = create_cache(name, one_layer)
        feed(one_layer, cache, ids, [100, *[1] * 45])
        return cache

    expected = feed(one_layer, read_before(), ids, [*AFTER])
    cache = read_before()
    with FailingOperations() as operations:
        cache.crop(-50)
    assert operations.count > 0
    for number in range(1, operations.count + 1):
        cache = read_before()
        with pytest.raises(torch.OutOfMemoryError), FailingOperations(number):
            cache.crop(-50)
        torch.testing.assert_close(feed(one_layer, cache, ids, [*AFTER]), expected)


@pytest.mark.parametrize("name", CACHES[:-1])
@torch.no_grad()
def test_layer_goes_on_to_move_where_memory_ended(one_layer, random_windows, name):
    device, ids = torch.device("meta"), torch.stack(random_windows(2, 320))

    def filled_layer() -> LazyLayer:
        cache = create_cache(name, one_layer)
        feed(one_layer, cache, ids, [100])
        return cache.layers[0]

    def held(layer: LazyLayer) -> list[tuple[str, torch.device, torch.Size]]:
        return [(part, tensor.device, tensor.shape) for part, tensor in layer.named_tensors()]

    moved = filled_layer()
    with FailingOperations() as operations:
        moved._move_to(device)
    for number in range(1, operations.count + 1):
        layer = filled_layer()
        with pytest.raises(torch.OutOfMemoryError), FailingOperations(number):
            layer._move_to(device)
        # The next update's states are on the other device still
        assert layer.device.type == "cpu"
        layer._move_to(device)
        assert layer.device == device and held(layer) == held(moved)


@pytest.mark.each_value
@pytest.mark.parametrize("before", [[100, *[1] * 40], [70, *[1] * 3, 230, *[1] * 20], [30, 1, 1]], ids=len)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", [*CACHES, "transform:max_cache_len=400", "gear-2bit:max_cache_len=400"])
@torch.no_grad()
def test_layer_is_as_before_a_change_that_fails(one_layer, random_windows, name, change, before):
    ids = torch.stack(random_windows(2, 340))
    filled = create_cache(name, one_layer)
    feed(one_layer, filled, ids, before)
    expected = feed(one_layer, copy.deepcopy(filled), ids, AFTER)
    twin = copy.deepcopy(filled)
    with FailingOperations() as operations:
        CHANGES[change](twin)
    for number in range(operations.count, 0, -max(operations.count // MOST_FAILURES, 1)):
        cache = copy.deepcopy(filled)
        with pytest.raises((torch.OutOfMemoryError, MemoryError)), FailingOperations(number):
            CHANGES[change](cache)
        got = feed(one_layer, cache, ids, AFTER)
        torch.testing.assert_close(got, expected, msg=lambda text, number=number: f"operation {number}: {text}")


@pytest.mark.parametrize("change", ["reorder", "repeat", "select"])
@torch.no_grad()
def test_a_change_that_some_layers_miss_is_no_batch_to_go_on_with(tiny_llama, random_windows, tmp_path, change):
    ids = torch.stack(random_windows(2, 120))
    cache = create_cache("transform", tiny_llama)
    feed(tiny_llama, cache, ids, [100])
    twin = copy.deepcopy(cache)
    with FailingOperations() as operations:
        CHANGES[change](twin)
    with pytest.raises(torch.OutOfMemoryError), FailingOperations(operations.count):
        CHANGES[change](cache)
    with pytest.raises(ValueError, match="broke off between layers"):
        feed(tiny_llama, cache.fork(1)[0], ids, [1])
    with pytest.raises(ValueError, match="broke off between layers"):
        cache.save(tmp_path / "cache.safetensors", tiny_llama)
    cache.reset()
    fresh = create_cache("transform", tiny_llama)
    torch.testing.assert_close(feed(tiny_llama, cache, ids, [100, 1]), feed(tiny_llama, fresh, ids, [100, 1]))


@torch.no_grad()
def test_a_prompt_whose_window_cannot_be_evicted_leaves_the_layer_as_it_was(tiny_model, random_windows):
    model = tiny_model("mistral-sliding", num_hidden_layers=1, sliding_window=100)
    ids, before = torch.stack(random_windows(2, 340)), [150, 60, 60]

    def read_before() -> Cache:
        cache = create_cache("transform:sliding=compressed", model)
        feed(model, cache, ids, before)
        return cache

    expected = feed(model, read_before(), ids, [30, *AFTER])
    cache = read_before()
    with FailingOperations() as operations:
        feed(model, cache, ids, [30])
    for number in range(operations.count, operations.count - 10, -1):
        cache = read_before()
        with pytest.raises(torch.OutOfMemoryError), FailingOperations(number):
            feed(model, cache, ids, [30])
        torch.testing.assert_close(feed(model, cache, ids, [30, *AFTER]), expected)
