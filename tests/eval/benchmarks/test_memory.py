"""Bytes that caches hold, and that a decode step makes beside them."""

import pytest
import torch

from kvcache_plugins.eval.benchmarks.memory import LiveBytes, measure_cache


@pytest.mark.parametrize("cache", ["dynamic", "gear-4bit"])
def test_a_dense_layer_is_one_without_a_window(saved_with_tokenizer, text_file, cache):
    threads = torch.get_num_threads()
    row = measure_cache(saved_with_tokenizer("gemma3-hybrid"), str(text_file), 300, cache, threads)
    # Keys and values of 301 tokens, 2 heads of 32 channels in float32
    assert row["dense_layer_bytes"] == 2 * 301 * 2 * 32 * 4
    assert row["decode_step_peak_bytes"] > 0 and row["rss_peak_after_load"] <= row["rss_peak"]


def test_live_bytes_are_those_of_tensors_alive_at_once():
    with LiveBytes() as live:
        for _ in range(3):
            torch.zeros(1000, dtype=torch.uint8).add_(1)
        assert live.peak == 1000
        kept = [torch.zeros(1000, dtype=torch.uint8)[:10] for _ in range(3)]
    assert live.peak == 3000 and len(kept) == 3
