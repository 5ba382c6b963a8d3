"""Runs of a sweep, one after the other, a JSON file for each: `kvcache-plugins eval sweep CONFIG.yaml`."""

import os
import time
from collections.abc import Callable, Iterator

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcache_plugins.console.inputs import load_for_evaluation
from kvcache_plugins.console.results import provenance, write_json
from kvcache_plugins.eval.harness.caches import CACHE_FAILURES

from .config import Run, Sweep
from .measures import measure


# What a cache may raise without taking the other runs with it
_FAILURES = (*CACHE_FAILURES, ImportError, OSError)


def run_sweep(sweep: Sweep, runs: list[Run], announce: Callable[[str], None]) -> Iterator[tuple[Run, str | None]]:
    """
    Runs what is given, loading each model once.

    Args:
        sweep (`Sweep`): Where results go.
        runs (`list[Run]`): Model by model.
        announce (`Callable[[str], None]`): Called before every run with what is done and how long all will take.

    Yields:
        Each run when it is done, with its error if it failed.
    """
    loaded: tuple[str, PreTrainedModel, PreTrainedTokenizerBase] | None = None
    start = time.perf_counter()
    for number, run in enumerate(runs):
        left = (time.perf_counter() - start) / number * (len(runs) - number) / 60 if number else None
        hint = "" if left is None else f", about {left:.0f} min left"
        announce(f"{number + 1} of {len(runs)}: {run.label}{hint}")
        if loaded is None or loaded[0] != run.model:
            # The last model goes before the next one comes
            loaded = None
            loaded = (run.model, *load_for_evaluation(run.model, run.dtype, run.device))
        _, model, tokenizer = loaded
        started = time.perf_counter()
        try:
            found = measure(run.kind, model, tokenizer, run.cache, run.options, sweep.base)
        except _FAILURES as error:
            yield run, f"{type(error).__name__}: {' '.join(str(error).split())}"
            continue
        seconds = time.perf_counter() - started
        content = {"benchmark": "sweep", **provenance(model.device), "settings": run.settings(), "seconds": seconds}
        path = sweep.out / run.file_name()
        # Renamed when it is whole, so that an interruption never leaves half a result
        partial = path.with_suffix(".partial")
        write_json(partial, {**content, **found})
        os.replace(partial, path)
        yield run, None
