"""The list of checks, a cache run through it, and the grid of what came out."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

from safetensors import SafetensorError
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.utils import logging

from . import checks_batch, checks_generation, checks_model, checks_state
from .models import tiny_models
from .subject import CacheMaker, Subject, Tokenizer


Status = Literal["pass", "fail", "unsupported"]

# What a cache under test may run into. Anything else (Ctrl-C, no memory left) ends the run.
_REPORTED_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    SafetensorError,
    copy.Error,
)
_CELLS = {"pass": "yes", "unsupported": "raises", "fail": "FAILS"}
_NOT_RUN = "-"


@dataclass(frozen=True, kw_only=True, slots=True)
class ContractCheck:
    """
    One item of the contract.

    Args:
        name (`str`): The row of the grid and the id in tests.
        summary (`str`): What has to hold.
        function (`Callable`): Takes a `Subject` and raises if it does not hold.
        on_hybrid (`bool`): Whether it is about models with sliding-window layers, and runs on one of those.
    """

    name: str
    summary: str
    function: Callable[[Subject], None]
    on_hybrid: bool = False

    def run(
        self, model: PreTrainedModel, tokenizer: Tokenizer, make_cache: CacheMaker, make_reference: CacheMaker
    ) -> None:
        """Raises whatever the check or the cache raises. `run_check` makes a `CheckResult` of it."""
        subject = Subject(model=model, tokenizer=tokenizer, make_cache=make_cache, make_reference=make_reference)
        self.function(subject)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """
    What a check found.

    Args:
        name (`str`): The check's.
        status (`str`): `"pass"`, `"unsupported"` (the cache said so by raising) or `"fail"`.
        detail (`str`): The error, empty if there was none.
    """

    name: str
    status: Status
    detail: str = ""


CONTRACT: tuple[ContractCheck, ...] = (
    ContractCheck(
        name="greedy",
        summary="what single steps give, near to `DynamicCache`",
        function=checks_generation.check_greedy,
    ),
    ContractCheck(
        name="sampling", summary="the same seed gives the same tokens", function=checks_generation.check_sampling
    ),
    ContractCheck(
        name="num-return-sequences",
        summary="several samples of one prompt",
        function=checks_generation.check_num_return_sequences,
    ),
    ContractCheck(
        name="beam-search",
        summary="beams as if recomputed at every step",
        function=checks_generation.check_beam_search,
    ),
    ContractCheck(
        name="prompt-lookup", summary="rejected drafts leave no trace", function=checks_generation.check_prompt_lookup
    ),
    ContractCheck(
        name="assisted",
        summary="drafts of an assistant model leave no trace",
        function=checks_generation.check_assisted,
    ),
    ContractCheck(
        name="multi-turn",
        summary="a second `generate` goes on from the first",
        function=checks_generation.check_multi_turn,
    ),
    ContractCheck(
        name="chunked-prefill",
        summary="`prefill_chunk_size` gives what chunks by hand give",
        function=checks_generation.check_chunked_prefill,
    ),
    ContractCheck(
        name="crop-recent", summary="`crop(-n)` of what was just appended", function=checks_state.check_crop_recent
    ),
    ContractCheck(
        name="crop-prompt",
        summary="`crop(-n)` deep into the prompt, and to nothing",
        function=checks_state.check_crop_prompt,
    ),
    ContractCheck(name="crop-zero", summary="`crop(0)` changes nothing", function=checks_state.check_crop_zero),
    ContractCheck(
        name="crop-positive", summary="`crop(n)` raises and changes nothing", function=checks_state.check_crop_positive
    ),
    ContractCheck(name="reset", summary="a reset cache is a fresh one", function=checks_state.check_reset),
    ContractCheck(name="reorder", summary="`reorder_cache` moves all of a row", function=checks_batch.check_reorder),
    ContractCheck(
        name="repeat-interleave",
        summary="`batch_repeat_interleave` gives independent copies",
        function=checks_batch.check_repeat_interleave,
    ),
    ContractCheck(
        name="select-indices",
        summary="`batch_select_indices` keeps the rows asked for",
        function=checks_batch.check_select_indices,
    ),
    ContractCheck(
        name="deepcopy", summary="a copy and its original go on independently", function=checks_state.check_deepcopy
    ),
    ContractCheck(
        name="left-padding", summary="a padded row gives what it gives alone", function=checks_batch.check_left_padding
    ),
    ContractCheck(
        name="left-padding-short",
        summary="the same with a row of a few tokens",
        function=checks_batch.check_left_padding_short_row,
    ),
    ContractCheck(
        name="row-isolation",
        summary="a row depends on no other, bit for bit",
        function=checks_batch.check_row_isolation,
    ),
    ContractCheck(
        name="lengths", summary="lengths and mask sizes agree at every step", function=checks_state.check_lengths
    ),
    ContractCheck(
        name="eager", summary="`eager` attention gives what `sdpa` gives", function=checks_model.check_eager
    ),
    ContractCheck(name="bfloat16", summary="a model in bfloat16", function=checks_model.check_bfloat16),
    ContractCheck(name="float16", summary="a model in float16", function=checks_model.check_float16),
    ContractCheck(
        name="hybrid", summary="a model with sliding-window layers", function=checks_model.check_hybrid, on_hybrid=True
    ),
    ContractCheck(
        name="device-map", summary="a model with Accelerate's hooks", function=checks_model.check_device_map
    ),
    ContractCheck(
        name="memory",
        summary="`memory()` is what the tensors have, `stats()` counts",
        function=checks_state.check_memory,
    ),
    ContractCheck(
        name="save-load", summary="a saved cache goes on after loading", function=checks_state.check_save_load
    ),
)
"""All items, in the order of the grid."""


def run_contract(
    model: PreTrainedModel,
    make_cache: Callable[[], Cache],
    *,
    make_cache_for: Callable[[PreTrainedModel], Cache] | None = None,
    make_reference: Callable[[], Cache] | None = None,
    tokenizer: Tokenizer = None,
    checks: Iterable[ContractCheck] = CONTRACT,
    on_result: Callable[[CheckResult], None] | None = None,
) -> list[CheckResult]:
    """
    Runs a cache through the contract. Nothing is assumed about how it stores what it holds.

    Args:
        model (`PreTrainedModel`):
            Any decoder. A tiny random one is enough and fast: `tiny_models()["llama"]`.
        make_cache (`Callable`):
            Makes a fresh cache for `model`. Give a cache that keeps 200 tokens or more exact a smaller buffer here, or
            nothing of its compression will be tested.
        make_cache_for (`Callable`, *optional*):
            Makes a fresh cache for another model: what the item about models with sliding windows needs, left out
            without.
        make_reference (`Callable`, *optional*):
            Makes the cache that is right by definition, by default `DynamicCache(config=model.config)`.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Prompts are text with it, random tokens without.
        checks (`Iterable[ContractCheck]`, *optional*): Those to run, by default all.
        on_result (`Callable`, *optional*): Called with each result as it comes.

    Example:

    ```python
    >>> from kvcache_plugins.contract import render_grid, run_contract, tiny_models
    >>> model = tiny_models()["llama"]
    >>> results = run_contract(model, lambda: MyCache(model.config))
    >>> print(render_grid({"mine": results}))
    ```
    """
    results = []
    for check in checks:
        if not check.on_hybrid:
            result = run_check(check, model, make_cache, make_reference=make_reference, tokenizer=tokenizer)
        elif make_cache_for is not None:
            hybrid = tiny_models()["hybrid"]
            result = run_check(check, hybrid, partial(make_cache_for, hybrid))
        else:
            continue
        results.append(result)
        if on_result is not None:
            on_result(result)
    return results


def run_check(
    check: ContractCheck,
    model: PreTrainedModel,
    make_cache: Callable[[], Cache],
    *,
    make_reference: Callable[[], Cache] | None = None,
    tokenizer: Tokenizer = None,
) -> CheckResult:
    """Runs one check on `model` itself, whatever the check is about. See `run_contract`."""

    def make_dynamic() -> Cache:
        return DynamicCache(config=model.config)

    try:
        with _silence():
            check.run(model, tokenizer, make_cache, make_reference or make_dynamic)
    except _REPORTED_ERRORS as error:
        return CheckResult(name=check.name, status=_status_of(error), detail=_describe(error))
    return CheckResult(name=check.name, status="pass")


def render_grid(results_by_cache: Mapping[str, Sequence[CheckResult]]) -> str:
    """
    A Markdown table with a row an item and a column a cache: `yes`, `raises` (not supported, and the cache says so),
    `FAILS`, or `-` where it was not run.
    """
    columns = {cache: {result.name: result for result in results} for cache, results in results_by_cache.items()}
    found = {name for results in columns.values() for name in results}
    known = [check.name for check in CONTRACT if check.name in found]
    names = known + sorted(found.difference(known))
    rows = [["item", *columns], ["---", *(":---:" for _ in columns)]]
    for name in names:
        cells = [_CELLS[results[name].status] if name in results else _NOT_RUN for results in columns.values()]
        rows.append([name, *cells])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


@contextmanager
def _silence() -> Iterator[None]:
    """Without the advice that Transformers gives on every unusual call of `generate`."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _status_of(error: BaseException) -> Status:
    """A cache declines an item by raising one of two errors that says so; every other error is a failure."""
    declines = isinstance(error, (NotImplementedError, ValueError)) and "support" in str(error)
    return "unsupported" if declines else "fail"


def _describe(error: BaseException) -> str:
    first_line = str(error).strip().partition("\n")[0]
    return first_line if isinstance(error, AssertionError) and first_line else f"{type(error).__name__}: {first_line}"
