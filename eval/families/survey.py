"""Caches tried on all families, each family in a process of its own.

A model that hangs, or takes its process along, costs its own row and nothing else. Processes are forked where that is
possible: PyTorch and Transformers are loaded once, and a cache may be made by any function, of which nothing has to be
sent.
"""

import multiprocessing
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from logging import CRITICAL
from multiprocessing.connection import Connection

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from .small_configs import small_config
from .trial import CAUGHT, CacheMaker, Outcome, refer, try_cache


SECONDS_A_FAMILY = 180
# Known to run in a second
_FIRST = "llama"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """
    A cache that is tried.

    Attributes:
        make_cache (`Callable`): makes a fresh one for a model.
        limit (`float`): how far from the dense cache's logits it may be, of what another prompt's are.
    """

    make_cache: CacheMaker
    limit: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyResult:
    """
    A row of the table.

    Attributes:
        family (`str`): the `model_type`.
        dense (`str`): why `DynamicCache` does not run it, so that nothing else was tried; empty if it does.
        outcomes (`dict[str, Outcome]`): by cache, what it did.
    """

    family: str
    dense: str = ""
    outcomes: dict[str, Outcome] = field(default_factory=dict)


def family_names() -> list[str]:
    """The `model_type` of every decoder that the installed Transformers has."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def build_family(family: str, seed: int = 0) -> PreTrainedModel:
    """A tiny random model of a family. PyTorch's global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(small_config(family)).eval()


def try_family(family: str, cases: Mapping[str, Case]) -> FamilyResult:
    """Tries caches on a family, in this process."""
    try:
        model = build_family(family)
        reference = refer(model)
    except CAUGHT as error:
        return FamilyResult(family=family, dense=f"{type(error).__name__}: {error}")
    outcomes = {name: try_cache(model, reference, case.make_cache, case.limit) for name, case in cases.items()}
    return FamilyResult(family=family, outcomes=outcomes)


def try_families(
    families: Iterable[str],
    cases: Mapping[str, Case],
    announce: Callable[[str], None] = lambda family: None,
    seconds_a_family: float = SECONDS_A_FAMILY,
) -> Iterator[FamilyResult]:
    """
    Tries caches on families, one after another.

    Args:
        families (`Iterable[str]`): their `model_type`s.
        cases (`Mapping[str, Case]`): the caches by name.
        announce (`Callable`): told of each family before it is tried.
        seconds_a_family (`float`): after so many a family is given up.
    """
    can_fork = "fork" in multiprocessing.get_all_start_methods()
    if can_fork:
        # What is loaded now is so in all processes
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try_family(_FIRST, cases)
        torch.set_num_threads(num_threads)
    for family in families:
        announce(family)
        yield _try_apart(family, cases, seconds_a_family) if can_fork else try_family(family, cases)


def _try_apart(family: str, cases: Mapping[str, Case], seconds: float) -> FamilyResult:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(family, cases, sender), daemon=True)
    process.start()
    sender.close()
    try:
        if receiver.poll(seconds):
            return receiver.recv()  # type: ignore[no-any-return]
        reason = f"gave no answer within {seconds:.0f} seconds"
    except EOFError:
        process.join()
        reason = f"its process ended with exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()
        receiver.close()
    return FamilyResult(family=family, dense=reason)


def _send_result(family: str, cases: Mapping[str, Case], sender: Connection) -> None:
    # Of random models with odd settings there is much to be said, which is not what was asked
    warnings.simplefilter("ignore")
    logging.set_verbosity(CRITICAL)
    torch.set_num_threads(1)
    sender.send(try_family(family, cases))
