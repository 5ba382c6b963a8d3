"""The contract can fail: caches with one bug each fail the items that the bug is about, and no other.

Here the bugs are in what a forward gets from a cache, and in what a cache says about itself. The others are in
`test_contract_catches.py`.
"""

import copy
from pathlib import Path

import pytest
import torch
from toy_caches import BrokenCaches, CompressedLayer, ModularCache, SavableCache, States
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvcache_plugins.contract import CONTRACT
from kvcache_plugins.contract.subject import RECORDS_PAST
from kvcache_plugins.reports.memory import MemoryReport, ReportingMixin, measure_memory


pytestmark = pytest.mark.skipif(not RECORDS_PAST, reason="the broken caches are written for newer releases' `crop`")

GENERATION = "greedy sampling num-return-sequences beam-search prompt-lookup assisted multi-turn chunked-prefill"
PADDING = "left-padding left-padding-short"
BROKEN = BrokenCaches()
bug = BROKEN.bug


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


@bug(f"{PADDING} row-isolation hybrid")
class RangesSharedByRows(CompressedLayer):
    def amplitude(self, states: torch.Tensor) -> torch.Tensor:
        return super().amplitude(states).amax(dim=0, keepdim=True).expand(len(states), -1, -1, -1)


@bug("row-isolation")
class RowsLeak(DynamicLayer):
    """A millionth of the mean of all rows in every row: below any tolerance, but not nothing."""

    def update(self, *args: object, **kwargs: object) -> States:
        keys, values = super().update(*args, **kwargs)
        return keys, values + 1e-6 * values.mean(dim=0, keepdim=True)


@bug(f"crop-prompt {PADDING} lengths eager hybrid")
class MaskSizeWrong(DynamicLayer):
    """Only for steps, for which no mask is made unless it has to be."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        length, offset = super().get_mask_sizes(query_length)
        return length + (query_length == 1), offset


@bug("lengths hybrid")
class MaximumWrong(DynamicLayer):
    def get_max_length(self) -> int:
        return 100


@bug(" ".join(check.name for check in CONTRACT))
class NotANumber(DynamicLayer):
    def update(self, *args: object, **kwargs: object) -> States:
        keys, values = super().update(*args, **kwargs)
        return keys, values * (torch.nan if keys.shape[-2] > 100 else 1)


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


@bug("sampling num-return-sequences")
class RandomNumbersTaken(DynamicLayer):
    def update(self, *args: object, **kwargs: object) -> States:
        torch.rand(1)
        return super().update(*args, **kwargs)


@bug("bfloat16 float16")
class SinglePrecisionOnly(DynamicLayer):
    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object) -> States:
        return super().update(key_states.float(), value_states.float())


@bug("bfloat16")
class ScaledInBfloat16(DynamicLayer):
    def update(self, *args: object, **kwargs: object) -> States:
        keys, values = super().update(*args, **kwargs)
        return (keys * 2, values) if keys.dtype == torch.bfloat16 else (keys, values)


@bug("float16")
class OverflowInFloat16(DynamicLayer):
    def update(self, *args: object, **kwargs: object) -> States:
        keys, values = super().update(*args, **kwargs)
        return keys, values * 1e5 / 1e5


class WrongUnlessSdpa(torch.Tensor):
    """Right in one function, and a little wrong in matrix products."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.nn.functional.scaled_dot_product_attention:
            return func(*(arg.as_subclass(torch.Tensor) for arg in args), **(kwargs or {}))
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result.as_subclass(torch.Tensor) * 0.9 if func is torch.matmul else result


@bug("eager")
class WrongUnderEager(DynamicLayer):
    def update(self, *args: object, **kwargs: object) -> States:
        keys, values = super().update(*args, **kwargs)
        return keys, values.as_subclass(WrongUnlessSdpa)


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


# That it fails no other item too is left to `make test-long`
@pytest.mark.parametrize("others", [False, pytest.param(True, marks=pytest.mark.long)], ids=["own", "all"])
@pytest.mark.parametrize("name", BROKEN.expected)
def test_contract_catches(name: str, others: bool, contract_model: PreTrainedModel) -> None:
    assert BROKEN.failing_items(name, contract_model, others=others) == BROKEN.expected[name]
