"""The registry: presets, options, errors that name what is known, third parties' entry points."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import Cache, DynamicCache, PreTrainedModel, QuantizedCache

from kvcache_plugins import create_cache, list_caches, register_cache, registry
from kvcache_plugins.registry import (
    CUDA,
    CacheEntry,
    check_cache,
    check_caches,
    describe_caches,
    parse_cache_spec,
    parse_option,
)


TRANSFORMERS_CACHES = {"dynamic", "offloaded", "quanto-4bit", "quanto-2bit", "hqq-4bit", "hqq-2bit", "fp8"}
BACKENDS = {"quanto": "optimum.quanto", "hqq": "hqq"}
GROUP_WISE = ["quanto-4bit", "quanto-2bit", "hqq-4bit", "hqq-2bit"]


pytestmark = pytest.mark.usefixtures("forgets")


def require_backend(name: str) -> None:
    """Skips where the package behind one of Transformers' caches is missing, or Transformers is too old for it."""
    if not describe_caches(name)[0].is_available:
        pytest.skip(f"`{name}` needs `{describe_caches(name)[0].requires}`")
    if name.partition("-")[0] in BACKENDS:
        pytest.importorskip(BACKENDS[name.partition("-")[0]])


def create_small(model: object, *, nbits: int = 4, rank: int = 0) -> Cache:
    """A cache for tests.

    Not part of the summary.
    """
    cache = DynamicCache()
    cache.options = {"nbits": nbits, "rank": rank}
    return cache


def test_lists_transformers_caches_and_ours() -> None:
    names = list_caches()
    assert set(names) >= TRANSFORMERS_CACHES
    assert {"transform", "gear-4bit", "gear-2bit", "gear-l-2bit", "kivi-2bit"} <= set(names)
    assert names == sorted(names)
    assert set(list_caches("gear*")) == {name for name in names if name.startswith("gear")}
    assert list_caches("no-such*") == []


def test_every_entry_has_a_summary_and_presets_that_its_factory_accepts() -> None:
    for entry in describe_caches():
        assert entry.summary, entry.name
        entry.check_options(entry.options)


def test_options_override_the_preset() -> None:
    register_cache("small", create_small, nbits=2, rank=8)
    assert create_cache("small").options == {"nbits": 2, "rank": 8}
    assert create_cache("small", rank=1).options == {"nbits": 2, "rank": 1}


def test_mistakes_name_what_is_known() -> None:
    register_cache("small", create_small)
    register_cache("list", lambda model: [], summary="no cache")
    register_cache("future", create_small, requires="torch>=1000")
    suggested = r"`rnk` for the cache `small`\. Did you mean `rank`\? .*: `nbits`, `rank`\."
    for error, message, call in (
        (ValueError, r"`dynamc`\. Did you mean `dynamic`\? See `kvcache", lambda: create_cache("dynamc")),
        (ValueError, r"`GEAR`\. Did you mean `gear`", lambda: create_cache("GEAR")),
        (ValueError, suggested, lambda: create_cache("small", rnk=2)),
        (ValueError, "Accepted options: none", lambda: create_cache("dynamic", rank=2)),
        (ValueError, "`rnk`", lambda: register_cache("new", create_small, rnk=2)),
        (ValueError, "`small` is registered already", lambda: register_cache("small", create_small, nbits=8)),
        (ValueError, "must be callable", lambda: register_cache("new", "kvcache_plugins.gear")),
        (TypeError, "`list` must return a Transformers `Cache`", lambda: create_cache("list")),
        (ImportError, r"`future` needs `torch>=1000`: `pip install 'torch>=1000'`", lambda: create_cache("future")),
    ):
        with pytest.raises(error, match=message):
            call()
    assert "new" not in list_caches()
    register_cache("small", create_small, nbits=8, overwrite=True)
    assert create_cache("small").options["nbits"] == 8
    assert [entry.summary for entry in describe_caches("small")] == ["A cache for tests."]


@pytest.mark.parametrize("name", ["", "two words", "a:b", "a,b", "a*"])
def test_names_that_are_no_words_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="must be a word"):
        register_cache(name, create_small)


def test_requirements_are_looked_up() -> None:
    assert CacheEntry(name="a", factory=create_small).is_available
    assert CacheEntry(name="a", factory=create_small, requires="torch").is_available
    assert CacheEntry(name="a", factory=create_small, requires="torch>=2").is_available
    assert not CacheEntry(name="a", factory=create_small, requires="torch>=1000").is_available
    assert not CacheEntry(name="a", factory=create_small, requires="no-such-distribution").is_available
    assert CacheEntry(name="a", factory=create_small, requires=CUDA).is_available == torch.cuda.is_available()


@pytest.mark.each_value
@pytest.mark.parametrize("name", sorted(TRANSFORMERS_CACHES - {"offloaded"}))
@pytest.mark.parametrize("num_prompt_tokens", [1, 37, 64, 89])
def test_transformers_caches_generate_and_report(name, num_prompt_tokens, tiny_llama):
    require_backend(name)
    cache = create_cache(name, tiny_llama)
    prompt = torch.randint(2, 128, (1, num_prompt_tokens))
    output = tiny_llama.generate(prompt, past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert output.shape[1] == num_prompt_tokens + 4
    assert cache.get_seq_length() == num_prompt_tokens + 3
    assert cache.memory().total_bytes > 0
    assert cache.stats()["tokens_cached"] == num_prompt_tokens + 3
    assert isinstance(cache, DynamicCache if name == "dynamic" else QuantizedCache)


@pytest.mark.parametrize("name", GROUP_WISE)
def test_filling_up_groups_keeps_the_states_of_any_length(name: str, tiny_llama: PreTrainedModel) -> None:
    require_backend(name)
    layer = create_cache(name, tiny_llama).layers[0]
    keys, values = torch.randn(2, 2, 71, 32), torch.randn(2, 2, 71, 32)
    layer.update(keys, values)
    held_keys, held_values = layer.update(keys[..., :1, :], values[..., :1, :])
    assert held_keys.shape == held_values.shape == (2, 2, 72, 32)
    worst = 0.2 if "4bit" in name else 1.5
    assert (held_keys[..., :71, :] - keys).abs().mean() < worst
    assert (held_values[..., :71, :] - values).abs().mean() < worst


@pytest.mark.parametrize("name", ["fp8", *GROUP_WISE])
def test_a_cache_that_needs_the_model_says_so(name: str) -> None:
    require_backend(name)
    with pytest.raises(ValueError, match="need to know the model"):
        create_cache(name)


def test_model_may_be_its_config_and_nothing_else(tiny_llama: PreTrainedModel) -> None:
    assert len(create_cache("dynamic", tiny_llama.config).layers) == 2
    with pytest.raises(ValueError, match="`model` must be a `PreTrainedModel`, a `PreTrainedConfig` or `None`"):
        create_cache("dynamic", "smollm2")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the error of a machine without CUDA")
def test_offloaded_needs_cuda_and_says_so(tiny_llama: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="`offloaded` cache needs a CUDA device"):
        create_cache("offloaded", tiny_llama)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_offloaded_refuses_a_model_on_the_cpu_and_serves_one_on_cuda(tiny_llama: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="on a CUDA device, but it is on `cpu`"):
        create_cache("offloaded", tiny_llama)
    model = tiny_llama.to("cuda")
    prompt = torch.randint(2, 128, (1, 9), device="cuda")
    expected = model.generate(prompt, max_new_tokens=5, do_sample=False)
    cache = create_cache("offloaded", model)
    assert torch.equal(model.generate(prompt, past_key_values=cache, max_new_tokens=5, do_sample=False), expected)


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A registry that has `dynamic`, on a path where a third party's distribution is installed."""
    (tmp_path / "third_party_caches.py").write_text(
        "from transformers import DynamicCache\n"
        "def create(model, *, window=8):\n"
        '    """Somebody else\'s cache"""\n'
        "    return DynamicCache()\n"
    )
    (tmp_path / "third_party_broken.py").write_text("raise RuntimeError('compiled for another torch')\n")
    info = tmp_path / "third_party-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[kvcache_plugins.caches]\n"
        "theirs = third_party_caches:create\n"
        "absent = third_party_caches:no_such_name\n"
        "broken = third_party_broken:create\n"
        "dynamic = third_party_caches:create\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_ENTRIES", {})
    register_cache("dynamic", create_small, summary="ours")
    registry._third_party.cache_clear()
    yield
    registry._third_party.cache_clear()


@pytest.mark.usefixtures("third_party")
def test_entry_points_are_found_and_a_taken_name_is_ours() -> None:
    with pytest.warns(UserWarning, match="`dynamic` of the package `third-party` .* is ignored"):
        assert list_caches() == ["absent", "broken", "dynamic", "theirs"]
    assert check_cache("dynamic").summary == "ours"
    theirs = check_cache("theirs")
    assert (theirs.summary, theirs.accepted_options) == ("Somebody else's cache", ["window"])
    assert isinstance(theirs.factory(None), DynamicCache)


@pytest.mark.filterwarnings("ignore:The cache `dynamic`")
@pytest.mark.usefixtures("third_party")
def test_broken_entry_points_do_not_break_the_others() -> None:
    with pytest.warns(UserWarning) as warned:
        assert [entry.name for entry in describe_caches()] == ["dynamic", "theirs"]
    texts = " ".join(str(warning.message) for warning in warned)
    assert "`broken` of the package `third-party`" in texts
    assert "`absent` of the package `third-party`" in texts
    with pytest.raises(ImportError, match="`broken` of the package `third-party` .*compiled for another torch"):
        check_cache("broken")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rank=8", ("rank", 8)),
        ("sparsity=0.02", ("sparsity", 0.02)),
        ("sparsity=1e-3", ("sparsity", 1e-3)),
        ("fused=true", ("fused", True)),
        ("fused=False", ("fused", False)),
        ("backbone=none", ("backbone", None)),
        (" backbone = per-token ", ("backbone", "per-token")),
        ("path=a=b", ("path", "a=b")),
    ],
)
def test_options_are_typed(text: str, expected: tuple[str, object]) -> None:
    name, value = parse_option(text)
    assert (name, value) == expected
    assert type(value) is type(expected[1])


@pytest.mark.parametrize("text", ["rank", "=8", ""])
def test_an_option_without_key_or_value_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="`key=value`"):
        parse_option(text)


def test_cache_specs_are_parsed() -> None:
    assert parse_cache_spec("gear-2bit") == ("gear-2bit", {})
    assert parse_cache_spec("gear-2bit:sparsity=0,rank=8") == ("gear-2bit", {"sparsity": 0, "rank": 8})
    assert parse_cache_spec("infinigen:calibration=C:/a") == ("infinigen", {"calibration": "C:/a"})


def test_a_named_factory_is_imported_when_it_is_needed() -> None:
    register_cache("named", "no_such_module:create", summary="of a module that is not there", nbits=4)
    assert "named" in list_caches()
    assert [entry.summary for entry in describe_caches("named")] == ["of a module that is not there"]
    with pytest.raises(ImportError, match="no_such_module"):
        create_cache("named")
    register_cache("theirs", "kvcache_plugins.gear.cache:GEARCache", nbits=2)
    assert create_cache("theirs").cache_config.key_nbits == 2


def test_values_are_checked_without_a_model() -> None:
    for spec, word in {
        "gear:nbits=5": "The cache `gear`: .*nbits",
        "h2o:heavy_ratio=2": "The cache `h2o`: `heavy_ratio`",
        "infinigen:max_fetch_ratio=2": "The cache `infinigen`: `max_fetch_ratio`",
        "infinigen:calibration=no-such-file": "The cache `infinigen`: `calibration` is `no-such-file`",
        "infinigen-transform:key_nbits=9": "The cache `infinigen-transform`: `key_nbits`",
    }.items():
        with pytest.raises(ValueError, match=word):
            check_caches([spec])
    # Options that only a model can judge are not refused
    assert check_caches(["transform", "infinigen:alpha=4", "transform"]) == ["transform", "infinigen:alpha=4"]


@pytest.mark.parametrize(
    "spec",
    ["gear:", ":", ":nbits=2", "gear:nbits", "gear:nbits=2,", "gear:nbits=2:rank=4", "gear:,nbits=2", "gear::nbits=2"],
)
def test_a_stray_colon_or_comma_is_an_error(spec: str) -> None:
    with pytest.raises(ValueError, match="form"):
        parse_cache_spec(spec)
