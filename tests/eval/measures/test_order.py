"""KL by the order in which a document comes: nothing for a cache without loss."""

import json

import pytest
import torch
from transformers import DynamicCache

from kvcache_plugins.console import inputs
from kvcache_plugins.eval.measures.order import cut_documents, measure_orders, updates_of


@pytest.mark.parametrize(
    ("order", "updates"),
    [("prompt", [100]), ("turn:30", [30, 70]), ("turn:100", [100]), ("chunks:40", [40, 40, 20])],
)
def test_orders_split_a_document(order, updates) -> None:
    assert updates_of(order, 100) == updates


@pytest.mark.parametrize("order", ["turn", "turn:0", "chunks:101", "chunks:x", "words:3"])
def test_unknown_orders_are_errors(order) -> None:
    with pytest.raises(ValueError, match="`order` has to be"):
        updates_of(order, 100)


def test_a_dense_cache_loses_nothing_in_any_order(tiny_llama) -> None:
    windows = [torch.randint(2, 128, (81,)) for _ in range(2)]
    orders = ["prompt", "turn:5", "chunks:16", "chunks:1"]
    rows = list(measure_orders(tiny_llama, windows, {"dense": DynamicCache}, orders, length=60, chunk=7))
    assert [row["order"] for row in rows] == orders
    assert all(row["kl"] == pytest.approx(0, abs=1e-9) for row in rows)
    assert len({row["memory_at_end"]["total_bytes"] for row in rows}) == 1


def test_documents_change_their_text() -> None:
    texts = [(torch.arange(100), [7]), (torch.arange(100, 200), [7])]
    first, second = cut_documents(texts, 21, torch.arange(300, 330), 11)
    assert first.tolist() == [7, *range(45, 55), *range(310, 320)]
    assert second.tolist() == [7, *range(145, 155), *range(310, 320)]
    assert cut_documents(texts, 21, None, 11)[0].tolist() == [7, *range(40, 60)]
    with pytest.raises(ValueError, match="takes 200 tokens of a text, but one has 100"):
        cut_documents(texts, 201, None, 11)


def test_documents_of_a_text_are_spread_evenly() -> None:
    texts = [(torch.arange(100), [200]), (torch.arange(300, 400), [200])]
    documents = cut_documents(texts, 21, None, 11, num_windows=2)
    assert [each[:2].tolist() for each in documents] == [[200, 20], [200, 60], [200, 320], [200, 360]]
    assert {each.numel() for each in documents} == {21}


def test_command_compares_orders(smollm2, shared_data, tmp_path, monkeypatch, run) -> None:
    monkeypatch.setattr(inputs, "load_for_evaluation", lambda *_: smollm2)
    text_file = tmp_path / "text.txt"
    text_file.write_text((shared_data / "wikitext2" / "wiki.test.raw").read_text(encoding="utf-8")[:6000])
    out = tmp_path / "out.json"
    words = ["eval", "order", "--text-file", str(text_file), "--length", "160", "--scored", "16", "--out", str(out)]
    words += ["--windows", "2"]
    run(*words, "--cache", "transform-16", "--order", "prompt", "--order", "chunks:80")
    content = json.loads(out.read_text())
    assert (content["settings"]["text_file"], content["settings"]["windows"]) == ("text.txt", 2)
    whole, chunks = content["rows"]
    assert (whole["order"], whole["kl_ratio"]) == ("prompt", 1)
    assert chunks["kl_ratio"] == pytest.approx(chunks["kl"] / whole["kl"])
    assert whole["kl"] > 0
    assert len(whole["kl_by_window"]) == 2
