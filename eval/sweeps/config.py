"""What a sweep measures, read from its file: caches x models x measures.

    models: [smollm2]
    caches: [dynamic, gear-2bit, "gear-2bit:rank=8"]
    out: results/small
    measures:
      copa: {task: kv_copa, limit: 200}
      book: {fidelity: {text_file: book.txt, windows: 4, prefix: 1024, scored: 256}}
      drift: {perplexity: {text_file: book.txt, length: 2048, chunk: 64}}
      pairs: {retrieval: {data_file: pairs.jsonl, records: 10, questions: 24}}

Paths are relative to the file and may name environment variables. A run that has its JSON file is not repeated; one
that is interrupted leaves none.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from kvcache_plugins.console.inputs import read_text
from kvcache_plugins.registry import check_caches

from .measures import MEASURES


_FIELDS = {"models", "caches", "out", "measures", "dtype", "device"}


@dataclass(frozen=True, kw_only=True)
class Run:
    """
    One cell of a sweep.

    Args:
        model, cache (`str`): As commands take them.
        name (`str`): The measure's name in the file.
        kind (`str`): What is measured: a key of `MEASURES`.
        options (`Mapping[str, Any]`): The measure's options.
        dtype, device (`str`, *optional*): As commands take them.
    """

    model: str
    cache: str
    name: str
    kind: str
    options: Mapping[str, Any]
    dtype: str | None = None
    device: str | None = None

    @property
    def label(self) -> str:
        """What `--only` is held against."""
        return f"{self.name}/{self.model}/{self.cache}"

    def settings(self) -> dict[str, Any]:
        """All that the result depends on."""
        return asdict(self)

    def file_name(self) -> str:
        """A name that differs whenever a setting does."""
        digest = hashlib.sha256(json.dumps(self.settings(), sort_keys=True).encode()).hexdigest()[:8]
        words = (self.name, Path(self.model).name, self.cache)
        slug = "-".join("".join(c if c.isalnum() or c in "-." else "_" for c in word) for word in words)
        return f"{slug}-{digest}.json"


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """
    A sweep's file.

    Args:
        runs (`tuple[Run, ...]`): Its cells, model by model.
        out (`Path`): Folder of the results.
        base (`Path`): Folder that paths of the measures are relative to.
    """

    runs: tuple[Run, ...]
    out: Path
    base: Path

    @classmethod
    def read(cls, path: Path) -> "Sweep":
        """Reads a YAML file. What is missing, unknown or wrong in it is a `ValueError` that names it."""
        content = yaml.safe_load(read_text(path, "config"))
        if not isinstance(content, dict):
            raise ValueError(f"{path}: a sweep has the fields {', '.join(sorted(_FIELDS))}")
        unknown, missing = content.keys() - _FIELDS, {"models", "caches", "out", "measures"} - content.keys()
        if unknown or missing:
            named = ", ".join(f"`{name}`" for name in sorted(unknown or missing))
            what = "unknown" if unknown else "missing"
            raise ValueError(f"{path}: {what} {named}. Known: {', '.join(sorted(_FIELDS))}")
        check_caches(content["caches"])
        measures = {name: _parse_measure(name, fields) for name, fields in content["measures"].items()}
        runs = tuple(
            Run(
                model=model,
                cache=cache,
                name=name,
                kind=kind,
                options=options,
                dtype=content.get("dtype"),
                device=content.get("device"),
            )
            for model in content["models"]
            for name, (kind, options) in measures.items()
            for cache in content["caches"]
        )
        return cls(runs=runs, out=path.parent / content["out"], base=path.parent)

    def pending(self, only: str = "*", again: bool = False) -> list[Run]:
        """Runs whose labels match, without those that have a result."""
        chosen = [run for run in self.runs if fnmatchcase(run.label, only)]
        if not chosen:
            labels = ", ".join(run.label for run in self.runs[:3])
            raise ValueError(f"`only` is `{only}`, which matches no run. There are, for instance, {labels}")
        return [run for run in chosen if again or not (self.out / run.file_name()).is_file()]


def _parse_measure(name: str, fields: Any) -> tuple[str, dict[str, Any]]:
    kinds = [kind for kind in MEASURES if isinstance(fields, dict) and kind in fields]
    if len(kinds) != 1:
        raise ValueError(f"measure `{name}` has to have one of {', '.join(MEASURES)}, but has {fields}")
    (kind,) = kinds
    rest = {key: value for key, value in fields.items() if key != kind}
    if kind == "task":
        return kind, {"task": fields[kind], **rest}
    if rest or not isinstance(fields[kind], dict):
        raise ValueError(f"measure `{name}`: the options of `{kind}` stand in it, as `{kind}: {{key: value}}`")
    return kind, fields[kind]
