"""One process that answers prompts, for `bench store`: it is started anew, as a user's program is, and ends.

    python -m kvcache_plugins.eval.benchmarks.store_process < request.json > answer.json

Its prompts come in one of three ways: `none` reads each from its first token on; `pickle` has one file with a pickled
`DynamicCache`, which is loaded, cropped to what it has in common with the prompt, and written anew; any other name is
a GEAR cache of a `PromptStore`.
"""

from __future__ import annotations

import copy
import json
import pickle
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from kvcache_plugins import PromptStore
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.models.reference_model import load_model


# More than a block of a store, so that compressed states are attended to
_WARM_UP = 300


class FirstToken(StoppingCriteria):
    """Notes when the first token is there, and stops nothing."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        self.cpu_seconds: float | None = None
        self._started = time.perf_counter(), time.process_time()

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.Tensor:
        if self.seconds is None:
            self.seconds = time.perf_counter() - self._started[0]
            self.cpu_seconds = time.process_time() - self._started[1]
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def answer_prompts(request: dict[str, Any]) -> list[dict[str, Any]]:
    """
    Seconds to the first token of every prompt, its tokens, and how many of it did not have to be read.

    Args:
        request (`dict`): `model`, `way`, `folder`, `prompts` (token ids), `new_tokens`, `num_threads`.
    """
    if request["num_threads"] is not None:
        torch.set_num_threads(request["num_threads"])
    model, _ = load_model(request["model"])
    # What is compiled, loaded or allocated the first time is no prompt's own
    with tempfile.TemporaryDirectory() as folder:
        _answer(model, request["way"], Path(folder), torch.tensor([request["prompts"][0][:_WARM_UP]]), 2)
    answers = []
    for token_ids in request["prompts"]:
        found = _answer(
            model, request["way"], Path(request["folder"]), torch.tensor([token_ids]), request["new_tokens"]
        )
        answers.append(found)
    return answers


def _answer(
    model: PreTrainedModel, way: str, folder: Path, input_ids: torch.Tensor, new_tokens: int
) -> dict[str, Any]:
    first = FirstToken()
    cache, num_saved = _cache_of(model, way, folder, input_ids)
    tokens = model.generate(  # type: ignore[operator]
        input_ids,
        **as_argument(cache),
        max_new_tokens=new_tokens,
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([first]),
    )
    total = time.perf_counter()
    if way == "pickle":
        _write_pickle(folder / "cache.pickle", tokens[:, : cache.get_seq_length()], cache)
    return {
        "first_token_s": first.seconds,
        "first_token_cpu_s": first.cpu_seconds,
        "keep_s": time.perf_counter() - total,
        "num_tokens": input_ids.shape[1],
        "num_saved": num_saved,
        "tokens": tokens[0, input_ids.shape[1] :].tolist(),
    }


def _cache_of(model: PreTrainedModel, way: str, folder: Path, input_ids: torch.Tensor) -> tuple[Cache, int]:
    if way == "none":
        return DynamicCache(config=model.config), 0
    if way == "pickle":
        cache = _read_pickle(model, folder / "cache.pickle", input_ids)
        return cache, cache.get_seq_length()
    store = PromptStore(folder)
    made = store.cache_for(model, input_ids, way)
    num_saved = made.get_seq_length()
    store.prefill(model, made, input_ids)
    return made, num_saved


def _read_pickle(model: PreTrainedModel, path: Path, input_ids: torch.Tensor) -> Cache:
    if not path.exists():
        return DynamicCache(config=model.config)
    with path.open("rb") as file:
        known, cache = pickle.load(file)
    length = min(known.shape[1], input_ids.shape[1] - 1)
    num_same = int((known[0, :length] == input_ids[0, :length]).long().cumprod(dim=0).sum())
    if not num_same:
        return DynamicCache(config=model.config)
    if num_same < cache.get_seq_length():
        cache.crop(num_same - cache.get_seq_length())
    return cache


def _write_pickle(path: Path, token_ids: torch.Tensor, cache: Cache) -> None:
    with path.open("wb") as file:
        pickle.dump((token_ids, copy.deepcopy(cache)), file)


if __name__ == "__main__":
    found = answer_prompts(json.load(sys.stdin))
    print(json.dumps(found))  # noqa: T201
