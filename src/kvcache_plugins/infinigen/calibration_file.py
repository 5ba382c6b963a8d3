"""The file of a calibration: what `calibrate` found out about a model, checked when it is read."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from kvcache_plugins.files.document import Document
from kvcache_plugins.files.refusal import RefusedFile, refusals
from kvcache_plugins.files.stored_tensors import StoredTensors
from kvcache_plugins.files.tensor_file import read_tensor_file, write_tensor_file
from kvcache_plugins.models.fingerprint import fingerprint


FORMAT = "kvcache_plugins.infinigen"
VERSION = 2
_ADVICE = "run `calibrate` and `save` anew"
CHOICES = ("stream", "corrected", "full")
_MASSES = ("oracle", "by_input", "by_stream", "corrected")
# Shares are sums of rounded numbers
_MAX_MASS = 1.01
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
Factors = tuple[torch.Tensor, torch.Tensor]


def write_calibration(
    path: str | Path, model: str, reports: Sequence[Mapping[str, Any]], corrections: Mapping[int, Factors]
) -> None:
    """Writes fingerprint, reports and corrections of a calibration; see `Calibration`."""
    tensors = {
        f"layers.{index}.{name}": factor
        for index, factors in corrections.items()
        for name, factor in zip(("down", "up"), factors, strict=True)
    }
    write_tensor_file(path, FORMAT, VERSION, {"model": model, "reports": list(reports)}, tensors)


def read_calibration(path: str | Path, model: PreTrainedModel) -> tuple[str, list[dict[str, Any]], dict[int, Factors]]:
    """
    What `write_calibration` wrote.

    Raises:
        ValueError: naming the file, if it is damaged, of another version, or of another model.
    """
    with refusals("calibration", path):
        document, tensors = read_tensor_file(path, FORMAT, VERSION, _ADVICE)
        digest = document.text("model")
        if digest != fingerprint(model):
            raise RefusedFile("was made for another model, or for the same one in another dtype")
        config = model.config.get_text_config(decoder=True)
        reports = [_read_report(row, config.num_hidden_layers) for row in document.rows("reports")]
        document.finish()
        if len({report["layer_idx"] for report in reports}) < len(reports):
            raise ValueError("`reports` tells of a layer twice")
        stored = StoredTensors(tensors)
        corrections = {
            report["layer_idx"]: _read_factors(stored.below(f"layers.{report['layer_idx']}."), config.hidden_size)
            for report in reports
            if report["choice"] == "corrected"
        }
        stored.finish()
    return digest, reports, corrections


def _read_report(document: Document, num_layers: int) -> dict[str, Any]:
    report: dict[str, Any] = {"layer_idx": document.integer("layer_idx", 0, num_layers - 1)}
    for name in _MASSES:
        report[name] = document.number(name)
        if not 0 <= report[name] <= _MAX_MASS:
            raise ValueError(f"`{name}` has to be a share of 1 but got {report[name]!r}")
    if report["oracle"] == 0:
        raise ValueError("`oracle` has to be above 0")
    report["choice"] = document.choice("choice", CHOICES)
    document.finish()
    return report


def _read_factors(stored: StoredTensors, hidden_size: int) -> Factors:
    down = stored.take("down", (hidden_size, None), *_DTYPES)
    up = stored.take("up", (down.shape[1], hidden_size), down.dtype)
    if not bool(down.isfinite().all() & up.isfinite().all()):
        raise ValueError("corrections have to be finite")
    return down, up
