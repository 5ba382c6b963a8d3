"""The list of checks, a cache run through it, and the grid of what came out."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, Cache, Gemma3TextConfig, LlamaConfig, PreTrainedModel
from transformers.utils import logging

# It imports those of generation and of state, which come first in the contract
from . import checks_model  # noqa: F401
from .subject import CHECKS, ContractCheck, Subject


Status = Literal["pass", "fail", "unsupported"]

# What a cache under test may run into. Anything else (Ctrl-C, no memory left) ends the run.
_REPORTED_ERRORS: tuple[type[Exception], ...] = (ArithmeticError, AssertionError, AttributeError, ImportError)
_REPORTED_ERRORS += (LookupError, NameError, OSError, RuntimeError, TypeError, ValueError, SafetensorError, copy.Error)
_CELLS = {"pass": "yes", "unsupported": "raises", "fail": "FAILS"}
_NOT_RUN = "-"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """
    Holds a check's status, `unsupported` where the cache said so by raising, and the error, empty if there was none.
    """

    name: str
    status: Status
    detail: str = ""


CONTRACT: tuple[ContractCheck, ...] = tuple(CHECKS)
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
    Runs a cache through the contract. Nothing is assumed about how it stores what it holds.

    Args:
        model (`PreTrainedModel`): any decoder. A tiny random one is enough and fast: `tiny_models()["llama"]`.
        make_cache (`Callable`): makes a fresh cache for `model`. Give a cache that keeps 200 tokens or more exact a
            smaller buffer here, or nothing of its compression will be tested.
        make_cache_for (`Callable`, *optional*): makes a fresh cache for another model: what the item about models with
            sliding windows needs, left out without.
        checks (`Iterable[ContractCheck]`, *optional*): those to run, by default all.
        on_result (`Callable`, *optional*): called with each result as it comes.
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
    """Runs one check on `model` itself, whatever the check is about. See `run_contract`."""
    subject = Subject(model=model, make_cache=make_cache)
    verbosity = logging.get_verbosity()
    # Transformers gives advice on every unusual call of `generate`
    logging.set_verbosity_error()
    try:
        check.function(subject)
    except _REPORTED_ERRORS as error:
        # A cache declines an item by raising one of two errors that says so; every other error is a failure
        declines = isinstance(error, (NotImplementedError, ValueError)) and "support" in str(error)
        first_line = str(error).strip().partition("\n")[0]
        is_plain = isinstance(error, AssertionError) and first_line
        detail = first_line if is_plain else f"{type(error).__name__}: {first_line}"
        return CheckResult(name=check.name, status="unsupported" if declines else "fail", detail=detail)
    finally:
        logging.set_verbosity(verbosity)
    return CheckResult(name=check.name, status="pass")


def render_grid(results_by_cache: Mapping[str, Sequence[CheckResult]]) -> str:
    """Renders Markdown, a row an item: `yes`, `raises` (as not supported), `FAILS`, or `-` where it was not run."""
    columns = {cache: {result.name: result for result in results} for cache, results in results_by_cache.items()}
    found = {name for results in columns.values() for name in results}
    known = [check.name for check in CONTRACT if check.name in found]
    names = known + sorted(found.difference(known))
    rows = [["item", *columns], ["---", *(":---:" for _ in columns)]]
    for name in names:
        cells = [_CELLS[results[name].status] if name in results else _NOT_RUN for results in columns.values()]
        rows.append([name, *cells])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


# Measured on `llama` as distances of logits: with 0.1 a lost token of 230 makes 0.1 to 0.2, 2-bit quantization 0.4 and
# another prompt 1.1. With the usual 0.02 attention is all but uniform and lost tokens leave no trace; from 0.2 on 2
# bits are as bad as another prompt.
_SHARP_INIT = 0.1
_SHAPE: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "initializer_range": _SHARP_INIT,
}


def tiny_models() -> dict[str, PreTrainedModel]:
    """
    Makes random models of two architectures: `llama` (grouped-query attention) and `hybrid` (Gemma 3, a layer with a
    sliding window before one of full attention).
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        llama = AutoModelForCausalLM.from_config(
            LlamaConfig(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, **_SHAPE),
            dtype=torch.float32,
        )
        hybrid = AutoModelForCausalLM.from_config(
            Gemma3TextConfig(
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                layer_types=["sliding_attention", "full_attention"],
                sliding_window=24,
                query_pre_attn_scalar=64,
                # Tied, a random model would say the same token again and again
                tie_word_embeddings=False,
                **_SHAPE,
            ),
            dtype=torch.float32,
        )
    return {"llama": llama.eval(), "hybrid": hybrid.eval()}
