"""The contract can fail: caches with one bug each fail the items that the bug is about, and no other.

First bugs in what is done to a cache between forwards: rolling back, starting over, reordering, copying. Then those in
what a forward gets from a cache, and in what a cache says about itself.
"""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from toy_caches import CompressedLayer, ModularCache, SavableCache, States
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvcache_plugins.contract import CONTRACT, CheckResult, ContractCheck, render_grid, run_contract
from kvcache_plugins.reports.memory import MemoryReport, ReportingMixin, measure_memory


CROP = "prompt-lookup assisted crop-recent crop-prompt hybrid"
GENERATION = "greedy sampling num-return-sequences beam-search prompt-lookup assisted multi-turn chunked-prefill"
PADDING = "left-padding left-padding-short"
# Run only for the bugs that are about them
SLOW_ITEMS = set(f"{GENERATION} bfloat16 float16 hybrid".split()) - {"greedy"}
# Caches with one bug each: what makes them, and the items of the contract that each has to fail
BROKEN: dict[str, tuple[Callable[[PreTrainedModel], Cache], set[str]]] = {}


def bug(items: str) -> Callable[[type], type]:
    """Lists a broken layer or cache class, with the items that it has to fail."""

    def register(broken: type) -> type:
        is_layer = issubclass(broken, DynamicLayer)
        make_cache = partial(ModularCache, layer_class=broken) if is_layer else broken
        BROKEN[broken.__name__] = make_cache, set(items.split())
        return broken

    return register


@bug("reorder hybrid")
class ReorderDeferredAndNotComposed(DynamicLayer):
    pending: torch.LongTensor | None = None

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.pending = beam_idx

    def update(self, *args: object, **kwargs: object) -> States:
        if self.pending is not None:
            super().reorder_cache(self.pending)
            self.pending = None
        return super().update(*args, **kwargs)


@bug("prompt-lookup assisted crop-zero hybrid")
class CropOfZeroEmpties(DynamicLayer):
    """The slice `[:-n]` with an `n` of 0."""

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if self.is_initialized and tokens_to_remove == 0:
            self.keys, self.values = self.keys[..., :-0, :], self.values[..., :-0, :]


@bug("crop-positive")
class CropOfPositiveRefusedTooLate(DynamicLayer):
    def crop(self, tokens_to_remove: int) -> None:
        super().crop(-abs(tokens_to_remove))
        super().crop(max(tokens_to_remove, 0))


@bug("crop-recent crop-prompt hybrid")
class CropOfHistoryFromTheStart(CompressedLayer):
    """Every length is right, the tokens are not."""

    def crop(self, tokens_to_remove: int) -> None:
        length, history = self.history_length(), self.history
        super().crop(tokens_to_remove)
        removed = length - self.history_length()
        self.history = [tensor[..., removed:, :] for tensor in history]


@bug("crop-recent crop-prompt crop-zero")
class CropPromisedAndDeclined(DynamicLayer):
    """`is_croppable` is inherited."""

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError("`crop` is not supported")


@bug("deepcopy")
class CopyOfHistoryShared(CompressedLayer):
    """Copies share a list that is filled in place."""

    def __deepcopy__(self, memo: dict[int, object]) -> "CopyOfHistoryShared":
        return copy.copy(self)

    def compress(self) -> None:
        history = self.history
        super().compress()
        history[:], self.history = self.history, history


@bug(PADDING)
class PaddingInRanges(CompressedLayer):
    """A range per channel over all tokens, padding or not."""

    def amplitude(self, states: torch.Tensor) -> torch.Tensor:
        return states.abs().amax(dim=-2, keepdim=True).expand(*states.shape[:-1], -1)


@bug("left-padding-short")
class PaddingInNewestRanges(CompressedLayer):
    """A range per channel over the newest tokens: padding enters only where a row is shorter than that."""

    def amplitude(self, states: torch.Tensor) -> torch.Tensor:
        return states[..., -64:, :].abs().amax(dim=-2, keepdim=True).expand(*states.shape[:-1], -1)


@bug(f"crop-prompt {PADDING} lengths eager hybrid")
class MaskSizeWrong(DynamicLayer):
    """Wrong for steps alone, which have no mask unless they need one."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        length, offset = super().get_mask_sizes(query_length)
        return length + (query_length == 1), offset


@bug(f"{GENERATION} crop-recent hybrid")
class HistoryLost(CompressedLayer):
    """Lengths are right, and what was compressed is gone."""

    def dense(self) -> States:
        positions = torch.arange(self.history_length())
        keys, values = super().dense()
        return keys.index_fill(-2, positions, 0), values.index_fill(-2, positions, 0)


@bug("multi-turn chunked-prefill")
class SecondPromptErasesFirst(DynamicLayer):
    """Takes every update of more than a few tokens for the first."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object) -> States:
        num_erased = self.get_seq_length() if key_states.shape[-2] in (13, 48, 71) else 0
        keys, values = super().update(key_states, value_states)
        keys[..., :num_erased, :], values[..., :num_erased, :] = 0, 0
        return keys, values


class WrongUnlessSdpa(torch.Tensor):
    """Right in one function, and a little wrong in matrix products."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.nn.functional.scaled_dot_product_attention:
            return func(*(arg.as_subclass(torch.Tensor) for arg in args), **(kwargs or {}))
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result.as_subclass(torch.Tensor) * 0.9 if func is torch.matmul else result


@bug("device-map")
class HooksDisliked(ModularCache):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        if any("_hf_hook" in vars(module) for module in model.get_decoder().layers):
            raise RuntimeError("this cache wants the model's blocks without hooks")


@bug("hybrid")
class EveryLayerSliding(ReportingMixin, Cache):
    """Takes every layer for one like the first."""

    def __init__(self, model: PreTrainedModel) -> None:
        own = DynamicCache(config=model.config).layers
        super().__init__(layers=[copy.deepcopy(own[0]) for _ in own])


@bug("memory")
class ScalesNotCounted(ModularCache):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model, CompressedLayer)

    def memory(self) -> MemoryReport:
        report = measure_memory(self)
        num_scales = sum(tensor.nbytes for layer in self.layers for tensor in layer.history[1::2])
        parts = {"all": report.total_bytes - num_scales}
        return MemoryReport(parts=parts, devices=report.devices, dense_bytes=0, num_values=0)


@bug("memory")
class NothingCounted(ModularCache):
    def stats(self) -> dict[str, int]:
        return {"tokens_compressed": 0}


@bug("save-load")
class RecentTokensNotSaved(SavableCache):
    def save(self, path: Path, model: PreTrainedModel) -> None:
        saved = copy.deepcopy(self)
        for layer in saved.layers:
            layer.map_recent(torch.zeros_like)
        super(RecentTokensNotSaved, saved).save(path, model)


def crops(change: Callable[[int], int]) -> dict[str, Callable]:
    """Removes another number of tokens than the argument of `crop`."""
    return {"crop": lambda layer, count: DynamicLayer.crop(layer, change(count))}


def returns(change: Callable[[torch.Tensor, torch.Tensor], States]) -> dict[str, Callable]:
    """Returns other keys and values from `update`."""
    return {"update": lambda layer, *args, **kwargs: change(*DynamicLayer.update(layer, *args, **kwargs))}


# Dense layers with another method: the items that they have to fail, and the method
for name, (items, method) in {
    "ReorderBackwards": (
        "beam-search reorder hybrid",
        {"reorder_cache": lambda layer, index: DynamicLayer.reorder_cache(layer, index.argsort())},
    ),
    "CropForgotten": (CROP, crops(lambda count: max(count, 0))),
    "CropOfPositiveAccepted": ("crop-positive", crops(lambda count: -abs(count))),
    "RepeatNotInterleaved": (
        "repeat-interleave",
        {
            "batch_repeat_interleave": lambda layer, count: layer.reorder_cache(
                torch.arange(len(layer.keys)).repeat(count)
            )
        },
    ),
    "SelectForgotten": (
        "select-indices",
        {"batch_select_indices": lambda layer, index: layer.reorder_cache(torch.arange(len(index)))},
    ),
    # Reset as static layers do
    "ResetToZeros": ("reset hybrid", {"reset": lambda layer: (layer.keys.zero_(), layer.values.zero_())}),
    # A millionth of the mean of all rows in every row: below any tolerance, but not nothing
    "RowsLeak": (
        "row-isolation",
        returns(lambda keys, values: (keys, values + 1e-6 * values.mean(dim=0, keepdim=True))),
    ),
    "MaximumWrong": ("lengths hybrid", {"get_max_length": lambda layer: 100}),
    "NotANumber": (
        " ".join(check.name for check in CONTRACT),
        returns(lambda keys, values: (keys, values * (torch.nan if keys.shape[-2] > 100 else 1))),
    ),
    "RandomNumbersTaken": ("sampling num-return-sequences", returns(lambda *states: (torch.rand(1), states)[1])),
    "ScaledInBfloat16": (
        "bfloat16",
        returns(lambda keys, values: (keys * (2 if keys.dtype == torch.bfloat16 else 1), values)),
    ),
    "OverflowInFloat16": ("float16", returns(lambda keys, values: (keys, values * 1e5 / 1e5))),
    "WrongUnderEager": ("eager", returns(lambda keys, values: (keys, values.as_subclass(WrongUnlessSdpa)))),
}.items():
    bug(items)(type(name, (DynamicLayer,), method))


# That it fails no other item too is left to `make test-long`
@pytest.mark.parametrize("others", [False, pytest.param(True, marks=pytest.mark.long)], ids=["own", "all"])
@pytest.mark.parametrize("name", BROKEN)
def test_broken_caches_fail_their_checks_alone(name: str, others: bool, contract_model: PreTrainedModel) -> None:
    make_cache, expected = BROKEN[name]
    names = expected | ({check.name for check in CONTRACT} - SLOW_ITEMS if others else set())
    checks = [check for check in CONTRACT if check.name in names]
    make = partial(make_cache, contract_model)
    results = run_contract(contract_model, make, make_cache_for=make_cache, checks=checks)
    assert {result.name for result in results if result.status == "fail"} == expected


@pytest.mark.parametrize(
    "make_cache",
    [
        pytest.param(ModularCache, marks=pytest.mark.long),
        pytest.param(partial(ModularCache, layer_class=CompressedLayer), marks=pytest.mark.long),
        SavableCache,
    ],
    ids=["dynamic", "compressed", "savable"],
)
def test_correct_caches_pass(make_cache: Callable[[PreTrainedModel], Cache], contract_model: PreTrainedModel) -> None:
    results = run_contract(contract_model, partial(make_cache, contract_model), make_cache_for=make_cache)
    assert [result.name for result in results] == [check.name for check in CONTRACT]
    declined = [] if make_cache is SavableCache else ["save-load"]
    assert [(result.name, result.detail) for result in results if result.status == "fail"] == []
    assert [result.name for result in results if result.status == "unsupported"] == declined


def test_third_party_caches_need_only_a_factory(contract_model: PreTrainedModel) -> None:
    seen: list[CheckResult] = []
    checks = [check for check in CONTRACT if check.name in ("crop-zero", "lengths", "hybrid", "memory")]
    results = run_contract(
        contract_model, lambda: DynamicCache(config=contract_model.config), checks=checks, on_result=seen.append
    )
    assert seen == results
    # A hybrid model needs `make_cache_for`; a cache of Transformers has no `memory()`
    assert [(result.name, result.status) for result in results] == [
        ("crop-zero", "pass"),
        ("lengths", "pass"),
        ("memory", "unsupported"),
    ]


@pytest.mark.parametrize(
    ("error", "status", "detail"),
    [
        (
            NotImplementedError("`crop` is not supported"),
            "unsupported",
            "NotImplementedError: `crop` is not supported",
        ),
        (ValueError("only supported for 4 bits"), "unsupported", "ValueError: only supported for 4 bits"),
        (ValueError("too many values to unpack"), "fail", "ValueError: too many values to unpack"),
        (RuntimeError("not supported"), "fail", "RuntimeError: not supported"),
        (AssertionError("the logits differ"), "fail", "the logits differ"),
        (IndexError("first line\nsecond line"), "fail", "IndexError: first line"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_declining_differs_from_failing(error, status, detail, contract_model):
    def raise_error(subject: object) -> None:
        raise error

    check = ContractCheck(name="mine", summary="", function=raise_error)
    (result,) = run_contract(contract_model, DynamicCache, checks=[check])
    assert result == CheckResult(name="mine", status=status, detail=detail)


def test_interrupting_ends_the_run(contract_model: PreTrainedModel) -> None:
    def interrupt(subject: object) -> None:
        raise KeyboardInterrupt

    check = ContractCheck(name="mine", summary="", function=interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_contract(contract_model, DynamicCache, checks=[check])


def test_grid_shows_every_check_and_cache() -> None:
    results = {
        "one": [CheckResult(name="reset", status="pass"), CheckResult(name="greedy", status="fail", detail="why")],
        "two": [CheckResult(name="mine", status="pass"), CheckResult(name="reset", status="unsupported")],
    }
    assert render_grid(results).splitlines() == [
        "| item | one | two |",
        "| --- | :---: | :---: |",
        "| greedy | FAILS | - |",
        "| reset | yes | raises |",
        "| mine | - | yes |",
    ]
