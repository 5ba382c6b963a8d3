"""Caches that fit a budget, how far they reach, and which of them is recommended."""

import json
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from kvcache_plugins import list_caches, predict_memory, recommend
from kvcache_plugins.advice.byte_sizes import parse_bytes, show_bytes
from kvcache_plugins.advice.recommendation import DEFAULT_CACHES, MEASURED_KL, CacheFit, Recommendation, find_largest


ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
RESULTS = [
    ROOT / "eval" / "results" / f"fidelity_{name}_1024_smollm2.json"
    for name in ("transform", "transform_calibrated", "peers")
]
# Caches of which one needs host memory and one none, and the dense one
CACHES = ["gear-2bit", "infinigen", "dynamic", "gear-4bit:nbits=3"]


def ask(model: PreTrainedModel, memory: int | str, context: int = 500, **options: object) -> Recommendation:
    return recommend(model.config, memory, context, **{"caches": CACHES, "dtype": "float32", **options})


def by_name(found: Recommendation) -> dict[str, CacheFit]:
    return {fit.cache: fit for fit in found.caches}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (7, 7),
        ("7", 7),
        ("8GiB", 2**33),
        (" 1.5 gb ", 1_500_000_000),
        ("500MB", 5 * 10**8),
        ("3 KiB", 3072),
        ("2tib", 2**41),
        ("12B", 12),
        ("123456789123456789kB", 123456789123456789000),
    ],
)
def test_sizes_are_read(text: int | str, size: int) -> None:
    assert parse_bytes("memory", text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "8 G", "8GiBs", "-1GB", "1e9", "inf", "nan", "1.GB", 0, "0.1B", True, 1.5]
)
def test_other_sizes_are_errors(text: object) -> None:
    with pytest.raises(ValueError, match="`memory` has to be"):
        parse_bytes("memory", text)  # type: ignore[arg-type]


def test_sizes_are_shown() -> None:
    assert [show_bytes(size) for size in (0, 1023, 1536, 2**30, 5 * 2**41)] == [
        "0 B",
        "1023 B",
        "1.50 KiB",
        "1.00 GiB",
        "10.00 TiB",
    ]


def test_what_never_is_too_much_has_no_largest() -> None:
    assert find_largest(lambda number: 0.5, 10, 2**24) is None
    assert find_largest(lambda number: number / 2**24, 10, 2**24) is None


def test_the_most_faithful_that_fits_is_recommended(contract_model: PreTrainedModel) -> None:
    sizes = {
        name: predict_memory(contract_model.config, name, 500, dtype="float32").devices["cuda"] for name in CACHES
    }
    assert sizes["infinigen"] < sizes["dynamic"]
    found = ask(contract_model, sizes["dynamic"])
    assert found.recommended == "dynamic"
    assert "nothing has to be given up" in found.reason
    # What is known to be faithful comes first, what was not measured last
    assert [fit.cache for fit in found.caches] == ["dynamic", "infinigen", "gear-2bit", "gear-4bit:nbits=3"]
    found = ask(contract_model, sizes["dynamic"] - 1)
    assert found.recommended == "infinigen"
    assert f"{show_bytes(by_name(found)['infinigen'].host_bytes)} of it are in host memory" in found.reason
    found = ask(contract_model, sizes["dynamic"] - 1, host_memory=100)
    assert found.recommended == "gear-2bit"
    assert not by_name(found)["infinigen"].fits
    assert (
        ask(contract_model, sizes["gear-4bit:nbits=3"], caches=["gear-4bit:nbits=3"]).recommended
        == "gear-4bit:nbits=3"
    )
    nothing = ask(contract_model, 1000)
    assert nothing.recommended is None
    assert nothing.reason == f"No cache fits: the smallest, `gear-2bit`, would hold {show_bytes(sizes['gear-2bit'])}."


def test_one_token_or_sequence_more_does_not_fit(contract_model: PreTrainedModel) -> None:
    memory, new_tokens = 600_000, 3
    found = ask(contract_model, memory, batch_size=2, new_tokens=new_tokens)

    def on_device(cache: str, context: int, batch_size: int) -> int:
        options = {"batch_size": batch_size, "new_tokens": new_tokens, "dtype": "float32"}
        return predict_memory(contract_model.config, cache, context, **options).devices["cuda"]

    for cache, fit in by_name(found).items():
        assert fit.fits == (fit.device_bytes <= memory)
        assert fit.device_bytes + fit.host_bytes == fit.memory.total_bytes
        assert fit.largest_context is not None
        assert fit.largest_batch_size is not None
        assert on_device(cache, fit.largest_context, 2) <= memory < on_device(cache, fit.largest_context + 1, 2)
        at_once = fit.largest_batch_size
        assert at_once == 0 or on_device(cache, 500, at_once) <= memory
        assert memory < on_device(cache, 500, at_once + 1)
    # The dense cache holds two layers of keys and values of two heads of 64 numbers, of two sequences
    assert by_name(found)["dynamic"].largest_context == memory // (2 * 2 * 2 * 64 * 4 * 2)
    assert by_name(found)["gear-2bit"].largest_context > 2 * by_name(found)["dynamic"].largest_context


def test_weights_are_counted_when_asked_for(contract_model: PreTrainedModel) -> None:
    weights = sum(parameter.nbytes for parameter in contract_model.parameters())
    alone = ask(contract_model, 300_000, caches=["dynamic"])
    together = ask(contract_model, 300_000 + weights, caches=["dynamic"], with_weights=True)
    assert (alone.weights_bytes, together.weights_bytes) == (weights, weights)
    assert together.available_bytes == 300_000
    assert together.caches == alone.caches
    too_little = ask(contract_model, weights - 1, caches=["dynamic"], with_weights=True)
    assert too_little.recommended is None
    assert too_little.available_bytes == too_little.caches[0].largest_context == 0
    config = type(contract_model.config)(**contract_model.config.to_dict())
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    assert recommend(config, "1GB", 100, caches=["dynamic"]).weights_bytes is None
    with pytest.raises(ValueError, match="`with_weights` needs to know the bytes"):
        recommend(config, "1GB", 100, caches=["dynamic"], with_weights=True)


def test_caches_of_the_readme_by_default(contract_model: PreTrainedModel) -> None:
    announced: list[str] = []
    found = ask(contract_model, "1MB", caches=None, on_progress=announced.append, context=300)
    assert {*by_name(found), *found.not_sized} == {*DEFAULT_CACHES} == {*announced} <= {*list_caches()}
    assert all(f"`{name}`" in README.read_text(encoding="utf-8") for name in DEFAULT_CACHES)
    # What is shown explains the order
    kl = [MEASURED_KL[fit.cache] for fit in found.caches]
    assert kl == sorted(kl)
    assert found.model == "llama"
    assert found.max_context == 1024
    hybrid = ask(contract_model, "1MB", caches=["gear-4bit"], device="cpu")
    assert hybrid.caches[0].host_bytes == 0


def test_named_caches_that_cannot_be_sized_are_errors(contract_model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="the cache `gear:nbits=5` cannot be sized"):
        ask(contract_model, "1MB", caches=["dynamic", "gear:nbits=5"])
    with pytest.raises(ValueError, match="Unknown cache `gaer`"):
        ask(contract_model, "1MB", caches=["gaer"])


@pytest.mark.parametrize("results", RESULTS, ids=lambda path: path.stem)
def test_kl_is_that_of_the_measured_tables(results: Path) -> None:
    rows = json.loads(results.read_text(encoding="utf-8"))["rows"]
    # Options make no name of their own, and some names of before are options now
    kl = {row["cache"]: round(row["kl"], 4) for row in rows if row["cache"] in list_caches()}
    assert len(kl) > 3
    assert {name: MEASURED_KL[name] for name in kl} == kl
