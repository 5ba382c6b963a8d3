"""InfiniGen's steps: parts add up to them, and pools are in memory or on disk as is said."""

import pytest
import torch

from kvcache_plugins import InfiniGenCache
from kvcache_plugins.eval.benchmarks.infinigen import mapped_bytes, time_parts
from kvcache_plugins.files.mapped_files import release
from kvcache_plugins.infinigen.disk_pages import DiskPages
from kvcache_plugins.infinigen.layer import InfiniGenLayer


def test_parts_add_up_to_the_step(tiny_model) -> None:
    model = tiny_model("llama", num_hidden_layers=3)
    token_ids = torch.randint(3, 128, (1, 300))
    with InfiniGenCache(model, speculate=True) as cache, torch.inference_mode():
        model(token_ids, past_key_values=cache)
        start_fetch = InfiniGenLayer._start_fetch
        parts = time_parts(lambda number: model(token_ids[:, :1], past_key_values=cache), 5)
    assert list(parts) == ["expected queries", "scoring", "choosing", "fetching and attention", "the model"]
    assert all(seconds > 0 for seconds in parts.values())
    assert cache.stats()["speculated_calls"] == 5
    # What was wrapped is what it was
    assert InfiniGenLayer._start_fetch is start_fetch


def test_rows(rows_of) -> None:
    dynamic, infinigen = rows_of("infinigen --cache dynamic --cache infinigen:share=0.1 --context 250 --steps 5")
    assert (dynamic["cache"], dynamic["speed_against_first"]) == ("dynamic", 1.0)
    assert infinigen["stats"]["selected_calls"] == 5
    assert sum(infinigen["parts_s"].values()) > 0
    assert "parts_s" not in dynamic


def test_pools(rows_of, tmp_path) -> None:
    options = f"--folder {tmp_path} --read 100 --steps 3 --context 1500 --context 250 --cache infinigen"
    rows = rows_of(f"infinigen {options}")
    places = [(length, place) for length in (1500, 250) for place in ("memory", "disk")]
    assert [(row["context"], row["place"]) for row in rows] == places
    assert all(row["stats"]["tokens_cached"] == row["context"] + 3 for row in rows)
    assert all(row["pool_bytes"] > 0 and row["median_s"] > 0 for row in rows)
    assert [row["mapped_bytes"] is None for row in rows] == [True, False, True, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--place tape", "`place`"),
        ("--folder . --cache gear", "`cache` has to keep"),
        ("--folder missing", "`folder`"),
    ],
)
def test_what_is_refused(assert_refused, options, message) -> None:
    assert_refused(f"infinigen --read 100 --steps 3 --context 250 {options}", message)


def test_mapped_bytes(tmp_path) -> None:
    disk = DiskPages(tmp_path)
    page = disk.new_page((1, 1, 1024, 256), torch.float32)
    page.fill_(1)
    assert mapped_bytes(tmp_path) == page.nbytes
    release(page)
    assert mapped_bytes(tmp_path) == 0
