"""Tasks that need much of their context through caches: the answer is fed token by token behind a prompt taken in.

The prompt but for its last token fills the cache in one forward, so every token of the answer is told by a decode
step. Negative log-likelihoods are of the right answer, KL is to the dense cache, and a token is right if it is the
likeliest: an answer, or a line of one, of which all are is what greedy decoding says behind what came before.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from kvcache_plugins.console.inputs import LoadedModel, load_for_evaluation
from kvcache_plugins.console.results import memory_fields
from kvcache_plugins.eval.context_tasks import TASKS, make_sample
from kvcache_plugins.eval.harness import REFERENCE, cache_factories, cache_stats, read_rows
from kvcache_plugins.reports.memory import measure_memory

from .fidelity import continuation_logits, fill_cache, score_logits


_Ids = tuple[tuple[int, ...], tuple[int, ...]]
# Logits of the dense cache by prompt and answer: all caches of a sweep are held against them
_dense: WeakKeyDictionary[PreTrainedModel, dict[_Ids, torch.Tensor]] = WeakKeyDictionary()


def decode_answer(model: PreTrainedModel, ids: _Ids, cache: Cache) -> torch.Tensor:
    """Feeds an answer to the model behind its prompt, and returns the logits of each token, `[tokens, vocabulary]`."""
    prompt, answer = map(torch.tensor, ids)
    fill_cache(model, prompt[:-1], cache)
    return continuation_logits(model, torch.cat([prompt[-1:], answer[:-1]]), cache, chunk=1)


def measure_tasks(
    cache: Sequence[str],
    model: str | LoadedModel,
    tasks: Sequence[str] = tuple(TASKS),
    length: int = 2048,
    samples: int = 1,
    scored: int = 96,
    start: float | None = None,
    data_file: Path | None = None,
) -> Iterator[dict[str, Any]]:
    """
    Scores caches by their specs on `samples` of each task, of `length` tokens, with `scored` tokens of answer at most,
    from the place `start` of it on, 0 to 1, by default samples at places spread over it. `data_file` has rows of
    `chain_of_thought` as JSON lines with `question` and `answer`.

    Yields a row for each cache: by task mean `nll` and `kl` of a token, shares of tokens `right`, of whole `lines` and
    of samples that are `exact`, and sizes; the tasks' mean `kl`; over all decode steps `fetched_bytes` a step and, as
    a share of a 16-bit cache's bytes, `fetched_share`, `None` of caches that fetch nothing; memory and counters of the
    last.
    """
    network, tokenizer = load_for_evaluation(model)
    known = _dense.setdefault(network, {})
    rows = read_rows(data_file, "data_file") if data_file else []

    def count_tokens(text: str) -> int:
        return len(tokenizer(text).input_ids)

    for spec, factory in cache_factories(cache, network).items():
        by_task: dict[str, dict[str, Any]] = {}
        fetched, share, steps = 0.0, 0.0, 0
        for task in tasks:
            total: Any = Counter()
            for index in range(samples):
                place = (index + 0.5) / samples if start is None else start
                sample = make_sample(task, count_tokens, length, scored, place, index, rows)
                prompt = tokenizer(sample.context).input_ids
                ids = tuple(prompt), tuple(tokenizer(sample.answer, add_special_tokens=False).input_ids)
                filled = factory()
                logits = decode_answer(network, ids, filled)
                if ids not in known:
                    exact = DynamicCache(config=network.config)
                    known[ids] = logits if spec == REFERENCE else decode_answer(network, ids, exact)
                targets = torch.tensor(ids[1], device=logits.device)
                score, right = score_logits(known[ids], logits, targets), logits.argmax(-1) == targets
                ends = [at for at, token in enumerate(ids[1], 1) if "\n" in tokenizer.decode([token])]
                lines = [bool(right[slice(*each)].all()) for each in pairwise([0, *ends])]
                total.update(nll=score.nll, kl=score.kl, right=int(right.sum()), exact=int(right.all()))
                total.update(num_scored=len(ids[1]), prompt=len(prompt), lines=sum(lines), num_lines=len(lines))
                memory, stats = measure_memory(filled), cache_stats(filled)
                steps += len(ids[1])
                moved: Any = stats.get("bytes_fetched", 0)
                fetched += moved
                share += moved * memory.kv_percent / (100 * memory.total_bytes)
            by_task[task] = {
                **{name: total[name] / total["num_scored"] for name in ("nll", "kl", "right")},
                "lines": total["lines"] / max(total["num_lines"], 1),
                **{name: total[name] / samples for name in ("exact", "prompt")},
                "num_scored": total["num_scored"],
            }
        yield {
            "cache": spec,
            "tasks": by_task,
            "kl": sum(each["kl"] for each in by_task.values()) / len(by_task),
            "fetched_bytes": fetched / steps or None,
            "fetched_share": share / steps or None,
            "memory_at_end": memory_fields(memory),
            "stats": stats,
        }
