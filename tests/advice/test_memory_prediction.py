"""Predicted bytes are those of a real run, for every registered cache, and from the config alone."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Cache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvcache_plugins import (
    InfiniGenCache,
    create_cache,
    list_caches,
    measure_memory,
    predict_memory,
    register_cache,
    registry,
)
from kvcache_plugins.advice.memory_prediction import CacheSizer, CacheSizingError
from kvcache_plugins.registry import parse_cache_spec
from kvcache_plugins.reports.memory import MemoryReport, ReportingMixin


# Their quantization asks for numbers in the middle of it
NEEDS_DATA = ["hqq-2bit", "hqq-4bit"]
# One of each kind; the others differ from these in bits
DAILY = (
    "dynamic",
    "fp8",
    "gear",
    "gear-4bit",
    "kivi-2bit",
    "kvarn-k4v2",
    "infinigen",
    "infinigen-gear",
    "h2o",
    "turboquant-4bit",
)
SIZED = [
    pytest.param(name, marks=() if name in DAILY else pytest.mark.long)
    for name in list_caches()
    if name not in [*NEEDS_DATA, "offloaded"]
]


@pytest.fixture(autouse=True)
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes do not depend on kernels, and nothing has to be compiled for these."""
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
    """To the byte, part by part, where within a per cent would do."""
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
def test_every_cache_after_a_prompt(
    name: str, setting: tuple[int, int], contract_model: PreTrainedModel, tiny_sizer: CacheSizer
) -> None:
    skip_without(name)
    assert_predicted(contract_model, tiny_sizer, name, context=setting[0], batch_size=setting[1])


# As many decoded tokens as one chunk of GEAR's and a run of InfiniGen's have, and a few more
@pytest.mark.parametrize(
    "name", ["dynamic", "fp8", "gear-2bit", "kcvt-4bit", "gear-t16", "infinigen", "h2o", "quanto-4bit"]
)
def test_decoded_tokens(name: str, contract_model: PreTrainedModel, tiny_sizer: CacheSizer) -> None:
    skip_without(name)
    assert_predicted(contract_model, tiny_sizer, name, context=146, new_tokens=67)


OPTIONS = [
    "gear:nbits=3,rank=8,low_rank_recent_ratio=0.3,sparsity=0.05,residual_length=32",
    # Three chunks of decoded tokens, and spare room for a fourth
    "gear:backbone=per-token,key_nbits=8,value_rank=0,residual_length=16",
    "gear:nbits=2,sparsity=0.0,key_sparsity=0.1,decode_rank=1,residual_length=48",
    "gear:nbits=2,num_sink_tokens=70,rotate_values=true,low_rank_recent_ratio=0.3,sparsity=0.05",
    "gear-k4v3",
    "gear-t30:residual_length=16,num_sink_tokens=0",
    # Decoded tokens alone: coded once there are enough of them for a table
    "gear-t22:key_nbits=1.3,num_sink_tokens=140",
    "infinigen:pool_tokens=100,scoring_nbits=2",
    "infinigen:pool_tokens=100,eviction=lru,recent=8,speculate=false",
    "infinigen-gear:key_nbits=2,value_nbits=3,recent=8",
    "infinigen:partial_ratio=0.3,eviction=fifo,pool_tokens=50",
    "h2o:grow=false,heavy_ratio=0.3",
]


@pytest.mark.parametrize("spec", OPTIONS)
def test_options(spec: str, contract_model: PreTrainedModel, tiny_sizer: CacheSizer) -> None:
    assert_predicted(contract_model, tiny_sizer, spec, context=213, new_tokens=51, batch_size=2)


# Sliding windows, other names of sizes, and states that tokens are summed up in
RECURRENT = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_types": ["conv", "full_attention", "conv"],
}


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "architecture", ["llama-mha", "llama-mqa", "qwen3", "gemma3-hybrid", "mistral-sliding", "gpt2", "opt"]
)
def test_architectures(architecture: str, dtype: str, tiny_model: Callable[..., PreTrainedModel]) -> None:
    if architecture == "opt" and Version(transformers.__version__) < Version("5.20"):
        pytest.skip("older releases look into OPT's mask, which has no data on the device `meta`: a `ValueError`")
    model = tiny_model(architecture).to(getattr(torch, dtype))
    sizer = CacheSizer(model.config, dtype=dtype, device="cpu")
    names = ["dynamic"] if architecture == "mistral-sliding" else ["dynamic", "gear-2bit", "gear-t22"]
    for name in names:
        assert_predicted(model, sizer, name, context=77, batch_size=2, new_tokens=2)


def test_recurrent_states() -> None:
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


def test_caches_of_others(
    contract_model: PreTrainedModel, tiny_sizer: CacheSizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))

    def create(model: PreTrainedModel) -> Cache:
        return Cache(layers=[ShorterLayer(index) for index in range(model.config.num_hidden_layers)])

    register_cache("shorter", create)
    assert_predicted(contract_model, tiny_sizer, "shorter", context=9, batch_size=2)
    assert len({tiny_sizer.measure(name, 9).total_bytes for name in ("shorter", "dynamic")}) == 2


def test_a_gpu_holds_the_same_and_what_is_offloaded_apart(contract_model: PreTrainedModel) -> None:
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


def test_a_folder_with_a_config_alone(contract_model: PreTrainedModel, tmp_path: Path) -> None:
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


def encoder_decoder() -> PreTrainedConfig:
    return CONFIG_MAPPING["t5"](d_model=32, num_layers=1, num_heads=2, d_kv=16, d_ff=32, vocab_size=50)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "/no/such/folder"}, "`model` is `/no/such/folder`, but there is no such folder"),
        ({"model": "no-such/model"}, "`model` is `no-such/model`, but its config cannot be had"),
        ({"model": 7}, "`model` has to be a name, a folder, a config or a model but got 7"),
        ({"model": encoder_decoder()}, "`model` is no decoder"),
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
def test_errors_name_what_is_accepted(
    options: dict[str, object], message: str, contract_model: PreTrainedModel
) -> None:
    arguments: dict[str, object] = {"model": contract_model.config, "cache": "gear", "context": 100, **options}
    with pytest.raises(ValueError, match=message):
        predict_memory(**arguments)


@pytest.mark.parametrize("name", NEEDS_DATA)
def test_what_needs_numbers_is_refused(name: str, tiny_sizer: CacheSizer) -> None:
    skip_without(name)
    with pytest.raises(CacheSizingError, match="it cannot be sized without being run"):
        tiny_sizer.measure(name, 300)


@pytest.mark.parametrize("name", ["gear", "infinigen", "infinigen-gear", "infinigen:pool_tokens=1500"])
def test_pools_of_several_pages(name: str, contract_model: PreTrainedModel, tiny_sizer: CacheSizer) -> None:
    """Without data a pool has one page, however many it has in a run."""
    assert_predicted(contract_model, tiny_sizer, name, context=2200)
    assert_predicted(contract_model, tiny_sizer, name, context=1100, new_tokens=70)
