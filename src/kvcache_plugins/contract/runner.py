"""The list of all checks, a run of them on a cache, and the grid of results."""

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, Cache, Gemma3TextConfig, LlamaConfig, PreTrainedModel
from transformers.utils import logging

from . import checks_generation, checks_model, checks_state
from .cache_under_test import CacheUnderTest, ContractCheck


Status = Literal["pass", "fail", "unsupported"]

# Errors that are a result of a check. Any other (Ctrl-C, no memory left) ends the run.
_REPORTED_ERRORS: tuple[type[Exception], ...] = (ArithmeticError, AssertionError, AttributeError, ImportError)
_REPORTED_ERRORS += (LookupError, NameError, OSError, RuntimeError, TypeError, ValueError, SafetensorError, copy.Error)
_CELLS = {"pass": "yes", "unsupported": "raises", "fail": "FAILS"}
_NOT_RUN = "-"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """
    Result of a check.

    Attributes:
        name (`str`): the item of the contract.
        status (`str`): `"pass"`, `"fail"`, or `"unsupported"` if the cache raised an error that says so.
        detail (`str`): the error, empty if there was none.
    """

    name: str
    status: Status
    detail: str = ""


def _as_item(check: Callable[[CacheUnderTest], None]) -> ContractCheck:
    """Return the item `some-name` of a function `check_some_name`; the docstring says what has to hold."""
    name = check.__name__.removeprefix("check_").replace("_", "-")
    on_hybrid = check is checks_model.check_hybrid
    return ContractCheck(name=name, summary=inspect.getdoc(check) or "", function=check, on_hybrid=on_hybrid)


CONTRACT: tuple[ContractCheck, ...] = tuple(
    _as_item(check)
    for check in (
        checks_generation.check_greedy,
        checks_generation.check_sampling,
        checks_generation.check_num_return_sequences,
        checks_generation.check_beam_search,
        checks_generation.check_prompt_lookup,
        checks_generation.check_assisted,
        checks_generation.check_multi_turn,
        checks_generation.check_chunked_prefill,
        checks_state.check_crop_recent,
        checks_state.check_crop_prompt,
        checks_state.check_crop_zero,
        checks_state.check_crop_positive,
        checks_state.check_reset,
        checks_state.check_deepcopy,
        checks_state.check_lengths,
        checks_state.check_memory,
        checks_state.check_save_load,
        checks_state.check_reorder,
        checks_state.check_repeat_interleave,
        checks_state.check_select_indices,
        checks_state.check_left_padding,
        checks_state.check_left_padding_short,
        checks_state.check_row_isolation,
        checks_model.check_eager,
        checks_model.check_bfloat16,
        checks_model.check_float16,
        checks_model.check_hybrid,
        checks_model.check_device_map,
    )
)
"""All items, in the order of the grid."""


def run_contract(
    model: PreTrainedModel,
    make_cache: Callable[[], Cache],
    *,
    make_cache_for: Callable[[PreTrainedModel], Cache] | None = None,
    checks: Iterable[ContractCheck] = CONTRACT,
    on_result: Callable[[CheckResult], None] | None = None,
) -> list[CheckResult]:
    """
    Run the contract on a cache. Nothing is assumed about the cache's storage.

    Args:
        model (`PreTrainedModel`): any decoder. A tiny random one is enough and fast: `tiny_models()["llama"]`.
        make_cache (`Callable`): makes a fresh cache for `model`. A cache that keeps 200 or more tokens exact needs a
            smaller buffer here; otherwise none of its compression is tested.
        make_cache_for (`Callable`, *optional*): makes a fresh cache for another model. The item about models with
            sliding windows needs it, and is left out without it.
        checks (`Iterable[ContractCheck]`, *optional*): checks to run, by default all.
        on_result (`Callable`, *optional*): called with each result.
    """
    results = []
    for check in checks:
        if not check.on_hybrid:
            result = run_check(check, model, make_cache)
        elif make_cache_for is not None:
            hybrid = tiny_models()["hybrid"]
            result = run_check(check, hybrid, partial(make_cache_for, hybrid))
        else:
            continue
        results.append(result)
        if on_result is not None:
            on_result(result)
    return results


def run_check(check: ContractCheck, model: PreTrainedModel, make_cache: Callable[[], Cache]) -> CheckResult:
    """Run one check on `model`, also one for hybrid models. See `run_contract`."""
    under_test = CacheUnderTest(model=model, make_cache=make_cache)
    verbosity = logging.get_verbosity()
    # Transformers warns of every unusual call of `generate`
    logging.set_verbosity_error()
    try:
        check.function(under_test)
    except _REPORTED_ERRORS as error:
        # A cache declines an item by one of two errors with the word "support"; any other error is a failure
        declines = isinstance(error, (NotImplementedError, ValueError)) and "support" in str(error)
        first_line = str(error).strip().partition("\n")[0]
        is_plain = isinstance(error, AssertionError) and first_line
        detail = first_line if is_plain else f"{type(error).__name__}: {first_line}"
        return CheckResult(name=check.name, status="unsupported" if declines else "fail", detail=detail)
    finally:
        logging.set_verbosity(verbosity)
    return CheckResult(name=check.name, status="pass")


def render_grid(results_by_cache: Mapping[str, Sequence[CheckResult]]) -> str:
    """Render Markdown with a row for each item: `yes`, `raises` (not supported), `FAILS`, or `-` (not run)."""
    columns = {cache: {result.name: result for result in results} for cache, results in results_by_cache.items()}
    found = {name for results in columns.values() for name in results}
    known = [check.name for check in CONTRACT if check.name in found]
    names = known + sorted(found.difference(known))
    rows = [["item", *columns], ["---", *(":---:" for _ in columns)]]
    for name in names:
        cells = [_CELLS[results[name].status] if name in results else _NOT_RUN for results in columns.values()]
        rows.append([name, *cells])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


# Distances of logits, measured on `llama` with 0.1: 0.1 to 0.2 for a lost token of 230, 0.4 for 2-bit quantization,
# 1.1 for another prompt. With the usual 0.02 attention is nearly uniform and lost tokens leave no trace; from 0.2 on
# 2 bits are as bad as another prompt.
_SHARP_INIT = 0.1
_SIZES: dict[str, object] = {
    "num_hidden_layers": 2,
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "initializer_range": _SHARP_INIT,
}
_LLAMA = {**_SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}
_HYBRID = {
    **_SIZES,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 24,
    "query_pre_attn_scalar": 64,
    # With tied embeddings a random model would repeat one token
    "tie_word_embeddings": False,
}


def tiny_models() -> dict[str, PreTrainedModel]:
    """
    Make random models of two architectures: `llama` (grouped-query attention) and `hybrid` (Gemma 3, a layer with a
    sliding window before one of full attention).
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        llama = AutoModelForCausalLM.from_config(LlamaConfig.from_dict(_LLAMA), dtype=torch.float32)
        hybrid = AutoModelForCausalLM.from_config(Gemma3TextConfig.from_dict(_HYBRID), dtype=torch.float32)
    return {"llama": llama.eval(), "hybrid": hybrid.eval()}
