"""Caches that fit a budget, how far they reach, and which of them is recommended; predicted bytes are those of a real
run, for every registered cache, and from the config alone.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvcache_plugins import (
    InfiniGenCache,
    create_cache,
    list_caches,
    measure_memory,
    predict_memory,
    recommend,
    register_cache,
    registry,
)
from kvcache_plugins.advice.byte_sizes import parse_bytes, show_bytes
from kvcache_plugins.advice.memory_prediction import CacheSizer, CacheSizingError
from kvcache_plugins.advice.recommendation import DEFAULT_CACHES, MEASURED_KL, CacheFit, Recommendation, find_largest
from kvcache_plugins.eval.result_files import read_result
from kvcache_plugins.registry import parse_cache_spec
from kvcache_plugins.reports.memory import MemoryReport, ReportingMixin


ROOT = Path(__file__).resolve().parents[2]
INDEX = ROOT / "docs" / "index.md"
RESULTS = [
    ROOT / "eval" / "results" / f"fidelity_{name}_1024_smollm2.json"
    for name in ("transform", "transform_calibrated", "peers")
]
# A cache that needs host memory, one that does not, and the dense one
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
def test_sizes_are_parsed_from_text(text: int | str, size: int) -> None:
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


def test_caches_that_never_exceed_memory_have_no_largest_size() -> None:
    assert find_largest(lambda number: 0.5, 10, 2**24) is None
    assert find_largest(lambda number: number / 2**24, 10, 2**24) is None


def test_most_faithful_cache_that_fits_is_recommended(contract_model: PreTrainedModel) -> None:
    sizes = {
        name: predict_memory(contract_model.config, name, 500, dtype="float32").devices["cuda"] for name in CACHES
    }
    assert sizes["infinigen"] < sizes["dynamic"]
    found = ask(contract_model, sizes["dynamic"])
    assert found.recommended == "dynamic"
    assert "nothing has to be given up" in found.reason
    # Caches are sorted by measured KL; unmeasured ones come last
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
    in_host = by_name(found)["infinigen"].host_bytes
    nothing = ask(contract_model, sizes["dynamic"] - 1, host_memory=100, caches=["infinigen"])
    assert nothing.reason.endswith(f", and {show_bytes(in_host)} in host memory.")


def test_kl_measured_on_own_text_sorts_caches(contract_model: PreTrainedModel) -> None:
    size = predict_memory(contract_model.config, "dynamic", 500, dtype="float32").devices["cuda"]
    kl = {"gear-2bit": 0.01, "transform": 0.02}
    found = ask(contract_model, size - 1, caches=None, kl=kl)
    assert found.recommended == "gear-2bit"
    assert [(fit.cache, fit.kl) for fit in found.caches] == [("dynamic", 0.0), *kl.items()]
    # Caches that were not measured come last, whatever they lose on other text
    assert [fit.cache for fit in ask(contract_model, size, kl=kl).caches][:2] == ["dynamic", "gear-2bit"]
    assert by_name(ask(contract_model, size, kl=kl))["infinigen"].kl is None
    # Also of the dense cache, which is listed once
    found = ask(contract_model, size, caches=None, kl={**kl, "dynamic": 0.0})
    assert [fit.cache for fit in found.caches] == ["dynamic", *kl]


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


def test_default_caches_are_listed_on_the_first_page(contract_model: PreTrainedModel) -> None:
    announced: list[str] = []
    found = ask(contract_model, "1MB", caches=None, on_progress=announced.append, context=300)
    assert {*by_name(found), *found.not_sized} == {*DEFAULT_CACHES} == {*announced} <= {*list_caches()}
    assert all(f"`{name}`" in INDEX.read_text(encoding="utf-8") for name in DEFAULT_CACHES)
    # The KL shown explains the order
    kl = [MEASURED_KL[fit.cache] for fit in found.caches]
    assert kl == sorted(kl)
    assert found.model == "llama"
    assert found.max_context == 1024
    hybrid = ask(contract_model, "1MB", caches=["gear-4bit"], device="cpu")
    assert hybrid.caches[0].host_bytes == 0


def test_named_caches_that_cannot_be_sized_are_errors(contract_model: PreTrainedModel) -> None:
    for caches in ("dynamic", []):
        with pytest.raises(ValueError, match="`caches` has to be a sequence"):
            ask(contract_model, "1MB", caches=caches)
    with pytest.raises(ValueError, match="`kl` has to be a mapping"):
        ask(contract_model, "1MB", kl=["gear-2bit"])
    with pytest.raises(ValueError, match="`kl` has to be a number"):
        ask(contract_model, "1MB", caches=None, kl={"gear-2bit": "0.1"})
    with pytest.raises(ValueError, match="the cache `gear:nbits=5` cannot be sized"):
        ask(contract_model, "1MB", caches=["dynamic", "gear:nbits=5"])
    with pytest.raises(ValueError, match="Unknown cache `gaer`"):
        ask(contract_model, "1MB", caches=["gaer"])


@pytest.mark.parametrize("results", RESULTS, ids=lambda path: path.stem)
def test_kl_equals_the_committed_results(results: Path) -> None:
    rows = read_result(results)["rows"]
    # Options make no name of their own, and some names of before are options now
    kl = {row["cache"]: round(row["kl"], 4) for row in rows if row["cache"] in list_caches()}
    assert len(kl) > 3
    assert {name: MEASURED_KL[name] for name in kl} == kl


# Their quantization asks for numbers in the middle of it
NEEDS_DATA = ["hqq-2bit", "hqq-4bit"]
# One of each kind; the others differ from these in bits
DAILY = (
    *("dynamic", "fp8", "transform", "gear-4bit", "kivi-2bit", "kvarn-k4v2"),
    *("infinigen", "infinigen-transform", "h2o", "turboquant-4bit"),
)
SIZED = [
    pytest.param(name, marks=() if name in DAILY else pytest.mark.long)
    for name in list_caches()
    if name not in [*NEEDS_DATA, "offloaded"]
]


@pytest.fixture(autouse=True)
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use kernels that need no compiling: bytes are the same with all."""
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "torch")


@torch.no_grad()
def run_really(
    model: PreTrainedModel, spec: str, context: int, batch_size: int = 1, new_tokens: int = 0
) -> MemoryReport:
    """A prompt, tokens one by one, and what the cache then holds."""
    name, options = parse_cache_spec(spec)
    cache = create_cache(name, model, **options)
    token_ids = torch.randint(5, 90, (batch_size, context))
    prompt_length = context - new_tokens
    for part in (token_ids[:, :prompt_length], *token_ids[:, prompt_length:].split(1, dim=1)[: new_tokens or 0]):
        model(part, past_key_values=cache, logits_to_keep=1)
    if isinstance(cache, InfiniGenCache):
        cache.detach()
    return cache.memory() if isinstance(cache, ReportingMixin) else measure_memory(cache)


def used_parts(report: MemoryReport) -> dict[str, int]:
    return {part: size for part, size in report.parts.items() if size}


def assert_predicted(model: PreTrainedModel, sizer: CacheSizer, spec: str, **setting: int) -> None:
    """Assert that predicted memory is exact, part by part, although a per cent would do."""
    really, predicted = run_really(model, spec, **setting), sizer.measure(spec, **setting)
    assert used_parts(predicted) == used_parts(really)
    assert (predicted.dense_bytes, predicted.num_values) == (really.dense_bytes, really.num_values)
    assert predicted.devices == {"cpu": really.total_bytes}


@pytest.fixture(scope="module")
def tiny_sizer(contract_model: PreTrainedModel) -> CacheSizer:
    return CacheSizer(contract_model, device="cpu")


def skip_without(name: str) -> None:
    if not registry._entry(name).is_available:
        pytest.skip(f"`{name}` needs `{registry._entry(name).requires}`")


@pytest.mark.parametrize("setting", [(1, 1), (63, 3), (211, 2)], ids=str)
@pytest.mark.parametrize("name", SIZED)
def test_predicted_memory_after_a_prompt_is_exact(name, setting, contract_model, tiny_sizer):
    skip_without(name)
    assert_predicted(contract_model, tiny_sizer, name, context=setting[0], batch_size=setting[1])


# Decode a chunk of GEAR's and a run of InfiniGen's, and a few tokens more
@pytest.mark.parametrize(
    "name", ["dynamic", "fp8", "gear-2bit", "kcvt-4bit", "transform-16", "infinigen", "h2o", "quanto-4bit"]
)
def test_predicted_memory_after_decoding_is_exact(
    name: str, contract_model: PreTrainedModel, tiny_sizer: CacheSizer
) -> None:
    skip_without(name)
    assert_predicted(contract_model, tiny_sizer, name, context=146, new_tokens=67)


# Before the codec's first fit, and its next
@pytest.mark.parametrize(("context", "new_tokens"), [(45, 25), (65, 2), (383, 283)])
@pytest.mark.parametrize("name", ["transform", "infinigen-transform"])
def test_predicted_memory_counts_queries_for_a_fit(name, context, new_tokens, contract_model, tiny_sizer):
    assert_predicted(contract_model, tiny_sizer, name, context=context, new_tokens=new_tokens)


OPTIONS = [
    "gear:nbits=3,rank=8,sparsity=0.05,residual_length=32",
    # Three chunks of decoded tokens, and spare room for a fourth
    "gear:backbone=per-token,key_nbits=8,rank=0,residual_length=16",
    "gear:nbits=2,sparsity=0.1,decode_rank=1,residual_length=48",
    "gear:nbits=2,num_sink_tokens=70,rotate_values=true,sparsity=0.05",
    "gear-k4v3",
    "transform-30:residual_length=16,num_sink_tokens=0",
    # Decoded tokens alone: coded once there are enough of them for a table
    "transform-22:key_nbits=1.3,num_sink_tokens=140",
    "infinigen:pool_tokens=100,scoring_nbits=2",
    "infinigen:pool_tokens=100,eviction=lru,recent=8,speculate=false",
    "infinigen-transform:key_nbits=2,value_nbits=3,recent=8",
    "infinigen:partial_ratio=0.3,eviction=fifo,pool_tokens=50",
    "h2o:grow=false,heavy_ratio=0.3",
]


@pytest.mark.parametrize("spec", OPTIONS)
def test_predicted_memory_follows_options(spec: str, contract_model: PreTrainedModel, tiny_sizer: CacheSizer) -> None:
    assert_predicted(contract_model, tiny_sizer, spec, context=213, new_tokens=51, batch_size=2)


# Sliding windows, other names of sizes, and states that tokens are summed up in
RECURRENT = {
    **{"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "layer_types": ["conv", "full_attention", "conv"]},
}


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "architecture", ["llama-mha", "llama-mqa", "qwen3", "gemma3-hybrid", "mistral-sliding", "gpt2", "opt"]
)
def test_predicted_memory_is_exact_for_every_architecture(
    architecture: str, dtype: str, tiny_model: Callable[..., PreTrainedModel]
) -> None:
    model = tiny_model(architecture).to(getattr(torch, dtype))
    sizer = CacheSizer(model.config, dtype=dtype, device="cpu")
    names = ["dynamic"] if architecture == "mistral-sliding" else ["dynamic", "gear-2bit", "transform-22"]
    for name in names:
        assert_predicted(model, sizer, name, context=77, batch_size=2, new_tokens=2)


def test_predicted_memory_counts_recurrent_states() -> None:
    config = CONFIG_MAPPING["lfm2"](**RECURRENT)
    model, sizer = AutoModelForCausalLM.from_config(config).eval(), CacheSizer(config, device="cpu")
    for name in ("dynamic", "gear-4bit"):
        assert_predicted(model, sizer, name, context=77, batch_size=3, new_tokens=1)


class ShorterLayer(DynamicLayer):
    """Keeps fewer tokens the deeper it stands."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx

    def update(self, *args: object, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:
        states = super().update(*args, **kwargs)
        self.keys, self.values = (each[:, :, self.layer_idx :].clone() for each in states)
        return states


def test_predicted_memory_is_exact_for_registered_caches(contract_model, tiny_sizer, monkeypatch):
    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))

    def create(model: PreTrainedModel) -> Cache:
        return Cache(layers=[ShorterLayer(index) for index in range(model.config.num_hidden_layers)])

    register_cache("shorter", create)
    assert_predicted(contract_model, tiny_sizer, "shorter", context=9, batch_size=2)
    assert len({tiny_sizer.measure(name, 9).total_bytes for name in ("shorter", "dynamic")}) == 2


def test_predicted_gpu_and_host_memory_sum_to_the_total(contract_model: PreTrainedModel) -> None:
    setting = {"context": 1500, "batch_size": 2, "dtype": torch.float32}
    for name in ("gear-2bit", "infinigen", "infinigen:pool_tokens=800"):
        there, here = (predict_memory(contract_model.config, name, device=each, **setting) for each in ("cuda", "cpu"))
        parts = used_parts(there)
        staging = parts.pop("staging", 0)
        assert parts == used_parts(here)
        assert sum(there.devices.values()) == here.total_bytes + staging
        # Rows of two heads of a key and a value of 64 numbers, in one of the two layers
        row = 2 * 2 * 128 * 4
        pages = {"gear-2bit": 0, "infinigen": 2, "infinigen:pool_tokens=800": 1}[name]
        record = 2 * 2 * 800 * (4 + 1) if "pool_tokens" in name else 0
        assert there.devices.get("cpu", 0) == pages * 1024 * row + record
        # A fifth of the tokens or of the pool
        assert staging == (int(0.2 * 1501) * row if pages else 0)


def test_memory_is_predicted_from_a_config_without_weights(contract_model: PreTrainedModel, tmp_path: Path) -> None:
    contract_model.config.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    report = predict_memory(str(tmp_path), "dynamic", 100, batch_size=2)
    # Two layers, keys and values, two heads of 64, in bfloat16
    assert report.devices == {"cuda": 2 * 2 * 2 * 2 * 100 * 64 * 2}
    assert report == predict_memory(tmp_path, "dynamic", 100, batch_size=2, dtype="bfloat16")
    assert report == predict_memory(contract_model, "dynamic", 100, batch_size=2)


def test_a_large_model_takes_no_memory_and_long_contexts_no_time() -> None:
    config = CONFIG_MAPPING["llama"](num_hidden_layers=3, hidden_size=8192, num_key_value_heads=8, vocab_size=10**6)
    sizer = CacheSizer(config)
    assert sizer.weights_bytes is not None
    assert sizer.weights_bytes > 2 * 2 * 8192 * 10**6
    dense = sizer.measure("dynamic", 10**6, batch_size=64).total_bytes
    for name in ("gear-2bit", "infinigen", "h2o"):
        assert sizer.measure(name, 10**6, batch_size=64).devices["cuda"] < dense


ENCODER_DECODER = CONFIG_MAPPING["t5"](d_model=32, num_layers=1, num_heads=2, d_kv=16, d_ff=32, vocab_size=50)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "/no/such/folder"}, "`model` is `/no/such/folder`, but there is no such folder"),
        ({"model": "no-such/model"}, "`model` is `no-such/model`, which is on the hub, and the hub cannot be reached"),
        ({"model": 7}, "`model` has to be a name, a folder, a config or a model but got 7"),
        ({"model": ENCODER_DECODER}, "`model` is no decoder"),
        ({"cache": "gaer"}, "Unknown cache `gaer`. Did you mean `gear`?"),
        ({"cache": "gear:rnk=1"}, "Unknown option `rnk`"),
        ({"cache": "gear:nbits=5"}, "the cache `gear:nbits=5` cannot be sized for this model: `key_nbits`"),
        ({"context": 0}, "`context` has to be an integer of at least 1 but got 0"),
        ({"batch_size": True}, "`batch_size` has to be an integer of at least 1 but got True"),
        ({"new_tokens": -1}, "`new_tokens` has to be an integer of at least 0"),
        ({"new_tokens": 100}, "they have to be fewer than 100 but are 100"),
        ({"dtype": "int4"}, "`dtype` must be one of `float32`, `bfloat16`, `float16`, but got `int4`"),
        ({"dtype": torch.int8}, "but got `torch.int8`"),
        ({"device": "gpu"}, r"`device` has to be one of \['cuda', 'cpu'\] but got 'gpu'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_errors_name_what_is_accepted(options, message, contract_model):
    arguments: dict[str, object] = {"model": contract_model.config, "cache": "transform", "context": 100, **options}
    with pytest.raises(ValueError, match=message):
        predict_memory(**arguments)


@pytest.mark.parametrize("name", NEEDS_DATA)
def test_caches_that_need_data_are_refused(name: str, tiny_sizer: CacheSizer) -> None:
    skip_without(name)
    with pytest.raises(CacheSizingError, match="it cannot be sized without being run"):
        tiny_sizer.measure(name, 300)


@pytest.mark.parametrize("name", ["transform", "infinigen", "infinigen-transform", "infinigen:pool_tokens=1500"])
def test_predicted_memory_counts_every_page_of_a_pool(
    name: str, contract_model: PreTrainedModel, tiny_sizer: CacheSizer
) -> None:
    """Pools of `meta` tensors have one page; predictions count the pages of a run."""
    assert_predicted(contract_model, tiny_sizer, name, context=2200)
    assert_predicted(contract_model, tiny_sizer, name, context=1100, new_tokens=70)
