"""lm-eval on several processes: each answers a share of the requests; what caches went through is put together."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from lm_eval.models.huggingface import HFLM

from kvcache_plugins.reports.memory import MemoryReport, StatValue

from .continuations import ContinuationScorer


@dataclass(frozen=True, slots=True)
class CacheRecord:
    """
    What the caches of a run went through; the attributes are those of `ContinuationScorer`.
    """

    counters: Counter[str] = field(default_factory=Counter)
    largest: MemoryReport | None = None
    largest_length: int = 0
    stats: Mapping[str, StatValue] = field(default_factory=dict)

    @classmethod
    def of(cls, scorer: ContinuationScorer) -> "CacheRecord":
        """That of one process."""
        return cls(Counter(scorer.counters), scorer.largest, scorer.largest_length, dict(scorer.stats))


def find_rank(model: HFLM) -> tuple[int, int]:
    """
    The number of this process and how many there are. Where processes have no GPU each, lm-eval's own model would have
    all of them answer everything.
    """
    accelerator = getattr(model, "accelerator", None)
    if accelerator is None:
        return model.rank, model.world_size
    return accelerator.process_index, accelerator.num_processes


def gather_records(own: CacheRecord, num_processes: int) -> CacheRecord:
    """The records of all processes as one: counters summed, the longest cache of all. Every process has to call it."""
    if num_processes == 1:
        return own
    records: list[CacheRecord] = [own] * num_processes
    torch.distributed.all_gather_object(records, own)
    longest = max(records, key=lambda record: record.largest_length)
    counters: Counter[str] = sum((record.counters for record in records), Counter())
    return CacheRecord(counters, longest.largest, longest.largest_length, longest.stats)
