"""The contract can fail: caches with one bug each fail the items that the bug is about, and no other.

Here the bugs are in what is done to a cache between forwards: rolling back, starting over, reordering, copying. Those
in what a forward gets from a cache are in `test_contract_catches_states.py`.
"""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from toy_caches import BrokenCaches, CompressedLayer, ModularCache, SavableCache, States
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvcache_plugins.contract import CONTRACT, CheckResult, ContractCheck, render_grid, run_contract
from kvcache_plugins.contract.subject import RECORDS_PAST


pytestmark = pytest.mark.skipif(not RECORDS_PAST, reason="the broken caches are written for newer releases' `crop`")

CROP = "prompt-lookup assisted crop-recent crop-prompt hybrid"
BROKEN = BrokenCaches()
bug = BROKEN.bug


@bug("beam-search reorder hybrid")
class ReorderForgotten(DynamicLayer):
    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        pass


@bug("beam-search reorder hybrid")
class ReorderBackwards(DynamicLayer):
    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx.argsort())


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


@bug("reorder hybrid")
class ReorderOfHistoryForgotten(CompressedLayer):
    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.map_recent(lambda tensor: tensor[beam_idx])


@bug(CROP)
class CropForgotten(DynamicLayer):
    def crop(self, tokens_to_remove: int) -> None:
        super().crop(max(tokens_to_remove, 0))


@bug(CROP)
class CropOfOneTooMany(DynamicLayer):
    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove - (tokens_to_remove < 0))


@bug(CROP)
class CropFromTheStart(DynamicLayer):
    def crop(self, tokens_to_remove: int) -> None:
        super().crop(max(tokens_to_remove, 0))
        if self.is_initialized:
            self.keys, self.values = self.keys[..., -tokens_to_remove:, :], self.values[..., -tokens_to_remove:, :]


@bug("prompt-lookup assisted crop-zero hybrid")
class CropOfZeroEmpties(DynamicLayer):
    """The slice `[:-n]` with an `n` of 0."""

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if self.is_initialized and tokens_to_remove == 0:
            self.keys, self.values = self.keys[..., :-0, :], self.values[..., :-0, :]


@bug("crop-positive")
class CropOfPositiveAccepted(DynamicLayer):
    def crop(self, tokens_to_remove: int) -> None:
        super().crop(-abs(tokens_to_remove))


@bug("crop-positive")
class CropOfPositiveRefusedTooLate(DynamicLayer):
    def crop(self, tokens_to_remove: int) -> None:
        super().crop(-abs(tokens_to_remove))
        super().crop(max(tokens_to_remove, 0))


@bug(CROP)
class CropOfHistoryForgotten(CompressedLayer):
    def crop(self, tokens_to_remove: int) -> None:
        DynamicLayer.crop(self, max(tokens_to_remove, -self.keys.shape[-2]))


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


@bug("repeat-interleave")
class RepeatForgotten(DynamicLayer):
    def batch_repeat_interleave(self, repeats: int) -> None:
        pass


@bug("repeat-interleave")
class RepeatNotInterleaved(DynamicLayer):
    def batch_repeat_interleave(self, repeats: int) -> None:
        self.keys, self.values = self.keys.repeat(repeats, 1, 1, 1), self.values.repeat(repeats, 1, 1, 1)


@bug("repeat-interleave")
class RepeatOfHistoryForgotten(CompressedLayer):
    """What is left at a smaller batch is broadcast to the larger without an error."""

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.map_recent(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def dense(self) -> States:
        self.map_history(
            lambda tensor: tensor[:1].expand(len(self.keys), -1, -1, -1) if len(tensor) < len(self.keys) else tensor
        )
        return super().dense()


@bug("select-indices")
class SelectForgotten(DynamicLayer):
    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.keys, self.values = self.keys[: len(indices)], self.values[: len(indices)]


@bug("select-indices")
class SelectOfHistoryForgotten(CompressedLayer):
    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.map_recent(lambda tensor: tensor[indices])
        self.map_history(lambda tensor: tensor[: len(indices)])


@bug("reset hybrid")
class ResetForgotten(DynamicLayer):
    def reset(self) -> None:
        pass


@bug("reset hybrid")
class ResetToZeros(DynamicLayer):
    """As static layers do it."""

    def reset(self) -> None:
        self.keys.zero_()
        self.values.zero_()


@bug("reset hybrid")
class ResetOfHistoryForgotten(CompressedLayer):
    """The history stays, though it is not counted."""

    num_forgotten = 0

    def reset(self) -> None:
        self.num_forgotten = self.history_length()
        DynamicLayer.reset(self)

    def get_seq_length(self) -> int:
        return super().get_seq_length() - self.num_forgotten


@bug("deepcopy")
class CopyShared(DynamicLayer):
    def __deepcopy__(self, memo: dict[int, object]) -> "CopyShared":
        return self


@bug("deepcopy")
class CopyOfHistoryShared(CompressedLayer):
    """Copies share a list that is filled in place."""

    def __deepcopy__(self, memo: dict[int, object]) -> "CopyOfHistoryShared":
        return copy.copy(self)

    def compress(self) -> None:
        history = self.history
        super().compress()
        history[:], self.history = self.history, history


# That it fails no other item too is left to `make test-long`
@pytest.mark.parametrize("others", [False, pytest.param(True, marks=pytest.mark.long)], ids=["own", "all"])
@pytest.mark.parametrize("name", BROKEN.expected)
def test_contract_catches(name: str, others: bool, contract_model: PreTrainedModel) -> None:
    assert BROKEN.failing_items(name, contract_model, others=others) == BROKEN.expected[name]


@pytest.mark.parametrize(
    "make_cache",
    [
        pytest.param(ModularCache, marks=pytest.mark.long),
        pytest.param(partial(ModularCache, layer_class=CompressedLayer), marks=pytest.mark.long),
        SavableCache,
    ],
    ids=["dynamic", "compressed", "savable"],
)
def test_right_caches_pass(make_cache: Callable[[PreTrainedModel], Cache], contract_model: PreTrainedModel) -> None:
    results = run_contract(contract_model, partial(make_cache, contract_model), make_cache_for=make_cache)
    assert [result.name for result in results] == [check.name for check in CONTRACT]
    declined = [] if make_cache is SavableCache else ["save-load"]
    assert [(result.name, result.detail) for result in results if result.status == "fail"] == []
    assert [result.name for result in results if result.status == "unsupported"] == declined


def test_third_party_needs_a_factory_alone(contract_model: PreTrainedModel) -> None:
    seen: list[CheckResult] = []
    checks = [check for check in CONTRACT if check.name in ("crop-zero", "lengths", "hybrid", "memory")]
    results = run_contract(
        contract_model, lambda: DynamicCache(config=contract_model.config), checks=checks, on_result=seen.append
    )
    assert seen == results
    # Without `make_cache_for` there is no cache for a hybrid model; a cache of Transformers has no `memory()`
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
def test_declining_is_told_from_failing(
    error: Exception, status: str, detail: str, contract_model: PreTrainedModel
) -> None:
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


def test_grid() -> None:
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
