"""Bytes of a long prompt are those that a run of it gives, or are not told."""

import pytest
from transformers import PreTrainedModel

from kvcache_plugins.advice.memory_prediction import CacheSizer
from kvcache_plugins.advice.straight_lines import PERIOD, continue_line
from kvcache_plugins.reports.memory import MemoryReport


CACHES = ["dynamic", "gear-4bit", "gear-k4v4", "kcvt-4bit", "h2o:heavy_ratio=0.07", "infinigen", "infinigen-gear"]


@pytest.mark.parametrize("rest", [0, 1, 63, PERIOD - 1])
@pytest.mark.parametrize("cache", CACHES)
def test_a_long_prompt_is_sized_as_if_it_were_run(cache: str, rest: int, tiny_llama: PreTrainedModel) -> None:
    sizer = CacheSizer(tiny_llama.config)
    context = 5 * PERIOD + rest
    told, run = sizer.measure(cache, context), sizer._run(cache, context, 1, 0)
    assert told == run


def test_decoded_tokens_come_after_it(tiny_llama: PreTrainedModel) -> None:
    sizer = CacheSizer(tiny_llama.config)
    assert sizer.measure("gear-2bit", 4 * PERIOD + 70, new_tokens=70) == sizer._run(
        "gear-2bit", 4 * PERIOD + 70, 1, 70
    )


def test_a_context_beyond_all_memory_is_sized(tiny_llama: PreTrainedModel) -> None:
    report = CacheSizer(tiny_llama.config).measure("dynamic", 10**12)
    assert report.total_bytes == report.dense_bytes > 10**12


def make_report(size: int, part: str = "dense") -> MemoryReport:
    return MemoryReport(parts={part: size}, devices={"cpu": size}, dense_bytes=size, num_values=size)


def test_what_is_not_straight_is_not_continued() -> None:
    assert continue_line([make_report(size) for size in (10, 20, 30)], 7) == make_report(70)
    assert continue_line([make_report(size) for size in (10, 20, 31)], 7) is None
    assert continue_line([make_report(10), make_report(20, "spare"), make_report(30)], 7) is None
