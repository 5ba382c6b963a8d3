"""Caches and memory reports in one line and in notebooks: numbers are those of `memory()`, any names are safe."""

import re
from xml.etree import ElementTree

import pytest
import torch
from transformers import Cache, PreTrainedModel

from kvcache_plugins import create_cache
from kvcache_plugins.layers.lazy_layer import LazyLayer
from kvcache_plugins.layers.phase import Phase
from kvcache_plugins.registry import describe_caches
from kvcache_plugins.reports.memory import MemoryReport, reachable_tensors, render_memory


OWN = ["gear-2bit", "gear-4bit", "h2o", "infinigen"]
# One of each kind
DAILY = ("dynamic", "transform", "gear-4bit", "kivi-2bit", "infinigen", "h2o", "turboquant-4bit", "fp8")
NAMES = [
    pytest.param(entry.name, marks=() if entry.name in DAILY else pytest.mark.long)
    for entry in describe_caches()
    if entry.is_available
]


def table(root: ElementTree.Element) -> dict[str, tuple[str, str]]:
    """Text of the cells, by part."""
    rows = [["".join(cell.itertext()).strip() for cell in row] for row in root.iter("tr")]
    return {part: (num_bytes, share) for part, num_bytes, share in rows}


def text_of(root: ElementTree.Element) -> str:
    return "".join(root.itertext())


def filled(name: str, model: PreTrainedModel, num_tokens: int = 200) -> Cache:
    """A cache by name after a prompt and two steps."""
    cache = create_cache(name, model)
    tokens = torch.arange(1, num_tokens + 1).remainder(120)[None]
    with torch.no_grad():
        for chunk in (tokens, tokens[:, :1], tokens[:, :1]):
            model(chunk, past_key_values=cache)
    return cache


@pytest.mark.parametrize("name", NAMES)
def test_reports_show_the_numbers_of_memory(tiny_llama: PreTrainedModel, name: str) -> None:
    cache = filled(name, tiny_llama)
    root = ElementTree.fromstring(cache._repr_html_())
    report, shown = cache.memory(), text_of(root)
    held = {part: num_bytes for part, num_bytes in report.parts.items() if num_bytes}
    assert {part: cells[0] for part, cells in table(root).items()} == {
        part: f"{num_bytes:,} bytes" for part, num_bytes in held.items()
    }
    for part, (_, share) in table(root).items():
        assert share == f"{100 * held[part] / report.total_bytes:.1f} %"
    assert f"{report.kv_percent:.1f} % of a cache at 16 bits" in shown
    assert f"{report.compression_ratio:.2f} times" in shown
    assert shown.strip().startswith(f"{type(cache).__name__}: {report.total_bytes / 1e6:.2f} MB")
    for counter, value in cache.stats().items():
        assert f"{counter}\N{NO-BREAK SPACE}{value:,}" in shown or isinstance(value, float)


def test_reports_load_nothing_and_set_no_style(tiny_llama: PreTrainedModel) -> None:
    markup = filled("gear-2bit", tiny_llama)._repr_html_()
    assert not re.search(r"<script|<style|style=|<img|href|src=|url\(|http", markup)


def test_names_are_escaped() -> None:
    bad = '<script>alert("1")</script>&\'x'
    report = MemoryReport(parts={bad: 30, "codes": 70}, devices={bad: 100}, dense_bytes=400, num_values=200)
    markup = render_memory(bad, report, {bad: 3})
    assert "<script" not in markup
    root = ElementTree.fromstring(markup)
    assert text_of(root).count(bad) == 4
    assert table(root) == {"codes": ("70 bytes", "70.0 %"), bad: ("30 bytes", "30.0 %")}


def test_an_empty_cache_says_so(tiny_llama: PreTrainedModel) -> None:
    for name in OWN:
        root = ElementTree.fromstring(create_cache(name, tiny_llama)._repr_html_())
        assert "holds nothing yet" in text_of(root)


def test_a_report_is_displayed_in_notebooks() -> None:
    report = MemoryReport(parts={"codes": 3, "spare": 0, "mine": 1}, devices={"cpu": 4}, dense_bytes=16, num_values=4)
    root = ElementTree.fromstring(report._repr_html_())
    assert table(root) == {"codes": ("3 bytes", "75.0 %"), "mine": ("1 bytes", "25.0 %")}
    assert "50.0 % of a cache at 16 bits" in text_of(root)
    assert "4.00 times" in text_of(root)
    assert "counters" not in text_of(root)


@pytest.mark.parametrize("name", ["dynamic", "gear-2bit", "h2o", "infinigen", "infinigen-transform", "fp8"])
def test_a_cache_is_printed_in_one_line(name: str, tiny_llama: PreTrainedModel) -> None:
    if not describe_caches(name)[0].is_available:
        pytest.skip(f"`{name}` needs `{describe_caches(name)[0].requires}`")
    cache = create_cache(name, tiny_llama)
    kind = type(cache).__name__
    assert repr(cache) == f"{kind}(empty)"
    with torch.no_grad():
        tiny_llama(torch.randint(2, 128, (1, 150)), past_key_values=cache)
    memory = cache.memory()
    size = f"{memory.total_bytes / 1e3:.1f} kB, {memory.kv_percent:.1f} % of 16 bits"
    assert repr(cache) == f"{kind}(150 tokens, {size})"
    assert re.fullmatch(r"\w+\([^\n]+\)", str(cache))


def held_by(cache: Cache) -> list[object]:
    """Return phases of all layers, and copies of every tensor that these refer to."""
    phases = [layer.phase for layer in cache.layers if isinstance(layer, LazyLayer)]
    return [phases, *(tensor.clone() for layer in cache.layers for tensor in reachable_tensors(layer))]


@pytest.mark.parametrize("earlier", [0, 200], ids=["first prompt", "later prompt"])
@pytest.mark.parametrize("name", NAMES)
def test_reports_change_nothing_before_attention(name: str, earlier: int, tiny_llama: PreTrainedModel) -> None:
    if earlier and name == "infinigen-paper":
        pytest.skip("a cache that speculates takes states of its own model's forwards alone")
    cache = filled(name, tiny_llama, earlier) if earlier else create_cache(name, tiny_llama)
    for index in range(tiny_llama.config.num_hidden_layers):
        cache.update(torch.randn(1, 2, 300, 32), torch.randn(1, 2, 300, 32), index)
    before = held_by(cache)
    layers = [layer for layer in cache.layers if isinstance(layer, LazyLayer)]
    named = [dict(layer.named_tensors()) for layer in layers]
    report = cache.memory()
    assert report == cache.memory() and repr(cache) and cache._repr_html_()
    for layer in layers:
        if layer.phase is Phase.PROMPT:
            assert layer.to_dense("keys").shape == layer.states_shape("keys")
    assert cache.stats() and cache.get_seq_length() == sum(layer.get_seq_length() for layer in cache.layers) // 2
    after = held_by(cache)
    assert before[0] == after[0] and len(before) == len(after)
    assert all(map(torch.equal, before[1:], after[1:]))
    # An uncommitted prompt is counted as its exact tokens
    for layer, tensors in zip(layers, named, strict=True):
        if layer.phase is Phase.PROMPT:
            assert tensors["residual"].shape == (1, 2, 300, 32)
    if not earlier and all(layer.phase is Phase.PROMPT for layer in layers) and layers:
        assert report.total_bytes == report.dense_bytes
