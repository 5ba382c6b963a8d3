"""Random sequences of everything that may be done to a cache, each held against several ways to be right.

A `CacheOperations` machine (Hypothesis draws its steps, and shortens those that fail) keeps beside the cache the mask
of its batch and, of every row, what it has been through. After each step lengths, mask sizes and bytes have to agree;
each forward has to give what a `DynamicCache` gives that went through the same (of settings that lose nothing) or what
attention over the densified states gives; in the end each row has to go on as it does alone, without padding.
"""

import copy
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvcache_plugins import create_cache, measure_memory
from kvcache_plugins.contract import tiny_models
from kvcache_plugins.contract.cache_under_test import CacheUnderTest
from kvcache_plugins.contract.comparison import distance, reachable_bytes, require_close, require_length
from kvcache_plugins.layers.lazy_layer import LazyLayer
from kvcache_plugins.layers.phase import Phase


MOST_TOKENS = 400
MOST_ROWS = 6
NUM_PROBES = 3
# Around groups of 16 and 64
_PROMPT_LENGTHS = (1, 2, 12, 15, 16, 17, 63, 64, 65, 130, 200)
# The last one fills and overflows buffers, and is a prompt of its own to some
_UPDATE_LENGTHS = (2, 5, 17, 64, 70, 130)
_REFUSED = ("other rows", "reorder", "select", "crop(3)")
# Phases of a layer after a forward or a rollback, by its phase before
_NEXT_PHASES = {
    Phase.EMPTY: {Phase.EMPTY, Phase.DENSE, Phase.STORED},
    Phase.DENSE: {Phase.DENSE, Phase.STORED, Phase.EMPTY},
    Phase.STORED: {Phase.STORED, Phase.EMPTY},
}
# Roundings of logits after a code that rounding has changed
_ROUNDING_OVER_A_CODE = 5
_SEEDS = st.integers(0, 1000)
# Contexts of PyTorch that calls are made in
_CONTEXTS = {
    "plain": nullcontext,
    "inference mode": torch.inference_mode,
    "autocast to bfloat16": partial(torch.autocast, "cpu", torch.bfloat16),
    "autocast to float16": partial(torch.autocast, "cpu", torch.float16),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """
    A cache and the promises that it is held to.

    Args:
        name (`str`): The registered name.
        options (`dict`): Its options.
        exactness (`float`, *optional*): Distance from `DynamicCache` that is right; `None` where the cache loses more.
        reads_dense (`bool`): True if attention over densified states gives the same.
        as_alone (`float`): Largest distance of a row from the same alone, as a share of the cache's own error. Kernels
            round otherwise for another shape, and a rounding error can turn a code over, or a choice of tokens.
        least_real (`int`): Tokens of the shortest row of a padded prompt.
        fits_again (`bool`): True if tables are fitted again when a sequence is four times as long.
        dtypes (`tuple`): Dtypes of the model.
    """

    name: str
    options: dict[str, object]
    exactness: float | None = None
    reads_dense: bool = True
    as_alone: float = 0.2
    least_real: int = 1
    fits_again: bool = False
    # Half precision is slow on a CPU
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float32, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Step:
    """
    Tokens `[1, length]` that were fed to a sequence in a context; the newest `num_removed` were removed again.
    """

    tokens: torch.Tensor
    num_removed: int = 0
    context: str = "plain"


class CacheOperations(RuleBasedStateMachine):
    """The operations; a subclass has the `kind`."""

    kind: Kind

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        model = model_in(data.draw(st.sampled_from(self.kind.dtypes)))
        make_cache = partial(create_cache, self.kind.name, model, **self.kind.options)
        self.under_test = CacheUnderTest(model=model, make_cache=make_cache)
        self.cache = self.under_test.make_cache()
        self.set_aside: list[tuple[Cache, list[torch.Tensor]]] = []
        self.context = "plain"
        self.phases: list[Phase] = []
        self._prompt(*self._draw_prompt(data))

    @rule(context=st.sampled_from([*_CONTEXTS]))
    def change_context(self, context: str) -> None:
        # From one half precision to the other even `DynamicCache` fails
        used = {self.context, *(step.context for row in self.rows for step in row)}
        is_second = any("autocast" in each and each != context for each in used)
        if "autocast" not in context or self.under_test.model.dtype == torch.float32 and not is_second:
            self.context = context

    @property
    def rounding(self) -> float:
        """Distance between logits that rounding may make: autocast rounds as a model of half precision does."""
        is_half = any("autocast" in step.context for row in getattr(self, "rows", []) for step in row)
        is_half |= "autocast" in self.context
        return max(self.under_test.rounding, 20 * torch.finfo(torch.bfloat16).eps if is_half else 0.0)

    @rule(data=st.data(), how=st.sampled_from(["reset", "crop"]))
    def start_over(self, data: st.DataObject, how: str) -> None:
        # Before anything is done: a sequence may end with what is drawn
        drawn = self._draw_prompt(data)
        self.cache.reset() if how == "reset" else self.cache.crop(-self.length)
        require_length(self.cache, 0, how)
        self._require_phases()
        if hasattr(self.cache, "save"):
            self._copy("save")
        self._prompt(*drawn)

    def _draw_prompt(self, data: st.DataObject) -> tuple[int, int, list[int]]:
        length, seed = data.draw(st.sampled_from(_PROMPT_LENGTHS)), data.draw(_SEEDS)
        most = max(length - self.kind.least_real, 0)
        paddings = data.draw(st.lists(st.integers(0, most), min_size=1, max_size=3))
        return length, seed, paddings

    def _prompt(self, length: int, seed: int, paddings: list[int]) -> None:
        starts = torch.tensor(paddings)
        # A `DynamicCache` without tokens would keep its batch size
        self.reference = None if self.kind.exactness is None else self.under_test.dense.make_cache()
        self.mask = (torch.arange(length) >= starts[:, None]).long()
        tokens = self.under_test.prompts(length, len(paddings), seed)
        self.rows = []
        self._feed(tokens)
        steps = (Step(row[None, start:], context=self.context) for row, start in zip(tokens, paddings, strict=True))
        self.rows = [[step] for step in steps]

    @precondition(lambda self: self.length < MOST_TOKENS)
    @rule(seed=_SEEDS, count=st.integers(1, 12))
    def decode(self, seed: int, count: int) -> None:
        *tokens, last = self.under_test.prompts(count, len(self.rows), seed).split(1, dim=1)
        for each in tokens:
            self._update(each)
        self._update_twice(last)

    @precondition(lambda self: self.length < MOST_TOKENS)
    @rule(seed=_SEEDS, length=st.sampled_from(_UPDATE_LENGTHS))
    def several_tokens(self, seed: int, length: int) -> None:
        self._update_twice(self.under_test.prompts(length, len(self.rows), seed))

    def _update_twice(self, tokens: torch.Tensor) -> None:
        if not self.kind.reads_dense:
            self._update(tokens)
            return
        twin = copy.deepcopy(self.cache)
        logits = self._update(tokens)
        with attention("densified", self.under_test.model), _CONTEXTS[self.context]():
            dense = self.under_test.feed(twin, tokens, self.mask)
        factor = 2 if has_same_codes(self.cache, twin) else _ROUNDING_OVER_A_CODE
        require_close(logits, dense, factor * self.rounding, "attention over densified states")

    def _update(self, tokens: torch.Tensor) -> torch.Tensor:
        self.mask = torch.cat([self.mask, torch.ones_like(tokens)], dim=1)
        logits = self._feed(tokens)
        for row, new in zip(self.rows, tokens.split(1), strict=True):
            row.append(Step(new, context=self.context))
        return logits

    def _feed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits of a forward through the cache, and compare them with the reference's if there is one."""
        with _CONTEXTS[self.context]():
            logits = self.under_test.feed(self.cache, tokens, self.mask)
        if self.reference is not None:
            with _CONTEXTS[self.context]():
                expected = self.under_test.feed(self.reference, tokens, self.mask)
            real = self.mask[:, -tokens.shape[1] :, None]
            limit = max(self.kind.exactness or 0, self.rounding)
            require_close(logits * real, expected * real, limit, "a `DynamicCache`")
        return logits

    @rule(share=st.integers(0, 100), of_last=st.booleans())
    def crop(self, share: int, of_last: bool) -> None:
        most = int(self.mask.sum(dim=1).min()) - 1
        if of_last:
            last = self.rows[0][-1]
            most = min(most, max(last.tokens.shape[1] - last.num_removed, 0))
        count = most * share // 100
        for each in self._caches():
            with _CONTEXTS[self.context]():
                each.crop(-count)
        self.mask = self.mask[:, : self.length - count]
        for row in self.rows:
            row[-1] = replace(row[-1], num_removed=row[-1].num_removed + count)

    def _caches(self) -> list[Cache]:
        return [self.cache] if self.reference is None else [self.cache, self.reference]

    @rule(data=st.data(), how=st.sampled_from(["reorder", "select", "repeat"]))
    def move_rows(self, data: st.DataObject, how: str) -> None:
        num_rows = len(self.rows)
        if how == "repeat":
            repeats = 2 if 2 * num_rows <= MOST_ROWS else 1
            sources = [index // repeats for index in range(repeats * num_rows)]
        else:
            fewest = num_rows if how == "reorder" else 1
            sources = data.draw(st.lists(st.integers(0, num_rows - 1), min_size=fewest, max_size=num_rows))
        for each in self._caches():
            with _CONTEXTS[self.context]():
                if how == "repeat":
                    each.batch_repeat_interleave(repeats)
                else:
                    _move(each, how, sources)
        self.mask = self.mask[sources]
        self.rows = [list(self.rows[source]) for source in sources]

    @rule(how=st.sampled_from(["deepcopy", "fork", "save"]))
    def copy(self, how: str) -> None:
        self._copy(how if how == "deepcopy" or hasattr(self.cache, how) else "deepcopy")

    def _copy(self, how: str) -> None:
        """Goes on with a copy; nothing that is done to it may be seen in what it was made of."""
        makers: dict[str, Callable[[], Cache]] = {
            "deepcopy": lambda: copy.deepcopy(self.cache),
            "fork": lambda: self.cache.fork(2)[1],
            "save": self._saved_and_loaded,
        }
        with _CONTEXTS[self.context]():
            made = makers[how]()
        self.set_aside = [*self.set_aside[-2:], (self.cache, stored(self.cache))]
        self.cache = made
        self.phases = []

    def _saved_and_loaded(self) -> Cache:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "cache.safetensors"
            self.cache.save(path, self.under_test.model)
            loaded = type(self.cache).load(path, self.under_test.model)
        if self.cache.get_seq_length():
            own, read = (
                [layer.to_dense(side) for layer in each.layers for side in ("keys", "values")]
                for each in (self.cache, loaded)
            )
            require_same(read, own, "by saving and loading")
            assert loaded.stats() == {**self.cache.stats(), "dense_reads": 0}
        return loaded

    @rule(what=st.sampled_from(_REFUSED))
    def refused(self, what: str) -> None:
        num_rows, before = len(self.rows), stored(self.cache)
        missing = [0] * (num_rows - 1) + [num_rows]
        calls: dict[str, Callable[[], object]] = {
            "crop(3)": lambda: self.cache.crop(3),
            "other rows": lambda: self.under_test.feed(self.cache, self.under_test.prompts(1, num_rows + 1, seed=1)),
        }
        try:
            calls.get(what, lambda: _move(self.cache, what, missing))()
        except (ValueError, IndexError, RuntimeError) as error:
            is_clear = isinstance(error, ValueError) or what not in calls
            assert is_clear, f"{what} raises {error!r}"
        else:
            raise AssertionError(f"{what} was not refused")
        require_same(stored(self.cache), before, f"after {what} was refused")

    @property
    def length(self) -> int:
        return self.mask.shape[1]

    @invariant()
    def agrees(self) -> None:
        for layer_idx in range(len(self.cache.layers)):
            assert self.cache.get_seq_length(layer_idx) == self.length
            assert self.cache.get_mask_sizes(3, layer_idx) == (self.length + 3, 0)
        self._require_phases()
        report, held = measure_memory(self.cache), reachable_bytes(self.cache)
        assert report.total_bytes == held, f"`memory()` says {report}, but {held} bytes are reachable"

    def _phases(self) -> list[Phase]:
        return [layer.phase for layer in self.cache.layers if isinstance(layer, LazyLayer)]

    def _require_phases(self) -> None:
        """Require that each layer is in a phase that may follow the last one, and that no report changes it."""
        phases = self._phases()
        for before, phase in zip(self.phases or phases, phases, strict=True):
            assert phase in _NEXT_PHASES[before], f"{before} was followed by {phase}"
        measure_memory(self.cache)
        assert phases == self._phases()
        self.phases = phases

    def teardown(self) -> None:
        for each, before in getattr(self, "set_aside", []):
            require_same(stored(each), before, "a cache that a copy was made of")
        for index in range(len(getattr(self, "rows", []))):
            self._require_as_alone(index)

    def _require_as_alone(self, index: int) -> None:
        steps = self.under_test.prompts(NUM_PROBES, len(self.rows), seed=7)
        row, row_steps = self.rows[index], steps[index : index + 1]
        logits = self.under_test.feed_each(copy.deepcopy(self.cache), steps, self.mask)[index : index + 1]
        alone, dense = (
            each.feed_each(_replayed(each, row), row_steps) for each in (self.under_test, self.under_test.dense)
        )
        # In half precision more is turned over
        is_half = self.under_test.model.dtype != torch.float32 or any("autocast" in step.context for step in row)
        share = max(0.5, self.kind.as_alone) if is_half else self.kind.as_alone
        # A padded batch gets its later tables together, by the length of its longest sequence: other tables, as good
        is_padded = not bool(self.mask.all())
        grown = sum(step.tokens.shape[1] for step in row) / row[0].tokens.shape[1]
        if self.kind.fits_again and is_padded and grown >= 4:
            share = max(0.5, share)
        limit = max(self.rounding, share * distance(alone, dense), self.kind.exactness or 0)
        require_close(logits, alone, limit, f"row {index}, and the same alone")


def attend_densified(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """Attends to dense copies of lazy states, as layers attend to these themselves under `eager` too."""
    return sdpa_attention_forward(module, query, key + 0, value + 0, *args, **options)


AttentionInterface.register("densified", attend_densified)
AttentionMaskInterface.register("densified", sdpa_mask)


@cache
def model_in(dtype: torch.dtype) -> PreTrainedModel:
    """The contract's tiny Llama in a dtype."""
    return tiny_models()["llama"].to(dtype)


def stored(each: Cache) -> list[torch.Tensor]:
    """Copies of every tensor of a cache."""
    return [tensor.clone() for layer in each.layers for _, tensor in layer.named_tensors()]


def has_same_codes(each: Cache, other: Cache) -> bool:
    """Return False if rounding in one layer has changed a code of the next."""
    pairs = zip(packed_codes(each), packed_codes(other), strict=True)
    return all(torch.equal(one, another) for one, another in pairs)


def packed_codes(each: Cache) -> list[torch.Tensor]:
    """List the codes of every layer."""
    return [tensor for layer in each.layers for name, tensor in layer.named_tensors() if name == "codes"]


def require_same(tensors: list[torch.Tensor], expected: list[torch.Tensor], what: str) -> None:
    """Raises an `AssertionError` if a tensor has changed."""
    same = len(tensors) == len(expected) and all(map(torch.equal, tensors, expected))
    assert same, f"what is stored has changed: {what}"


@contextmanager
def attention(implementation: str, model: PreTrainedModel) -> Iterator[None]:
    """`model` with another attention implementation for a while."""
    original = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(original)


def _move(each: Cache, how: str, sources: list[int]) -> None:
    method = each.reorder_cache if how == "reorder" else each.batch_select_indices
    method(torch.tensor(sources))


def _replayed(under_test: CacheUnderTest, row: list[Step]) -> Cache:
    """A fresh cache that has been through what a row has."""
    made = under_test.make_cache()
    for step in row:
        with _CONTEXTS[step.context]():
            under_test.feed(made, step.tokens)
        made.crop(-step.num_removed)
    return made
