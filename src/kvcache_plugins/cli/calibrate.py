"""`kvcache-plugins calibrate`: fit transform coding, InfiniGen or OSCAR to a model, once."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcache_plugins.console import inputs
from kvcache_plugins.console.display import make_table, open_console, track_progress
from kvcache_plugins.console.results import prepare_file, print_json, provenance


if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvcache_plugins.infinigen.calibration import LayerReport


# Number of windows of every text, and tokens of a window
_DEFAULTS = {"transform": (6, 512), "oscar": (6, 512), "infinigen": (8, 1024)}


def main(
    text_file: Annotated[list[Path] | None, typer.Option(help="Text like what a model will read; repeatable.")] = None,
    out: Annotated[Path | None, typer.Option(help="safetensors file to write; transform has a default.")] = None,
    cache: Annotated[str, typer.Option(help="transform, infinigen or oscar.")] = "transform",
    model: inputs.ModelOption = "smollm2",
    windows: Annotated[int | None, typer.Option(help="Windows of every text (6; infinigen 8).", min=1)] = None,
    length: Annotated[int | None, typer.Option(help="Tokens a window (512; infinigen 1024).", min=4)] = None,
    rank: Annotated[int | None, typer.Option(help="infinigen: rank of corrections (128); 0 for none.", min=0)] = None,
    min_recall: Annotated[
        float | None, typer.Option(help="infinigen: layers below it stay whole (0.9).", min=0, max=1)
    ] = None,
    dtype: inputs.DtypeOption = None,
    device: inputs.DeviceOption = None,
    as_json: inputs.JsonOption = False,
) -> None:
    """Calibrate transform coding, InfiniGen or OSCAR.

    transform: finds the bases that the presets `calibrated-12`, `calibrated-16`, ... code keys and values in, and how
    much their errors cost. The first half of a window fills a cache, the other measures the effect of errors. It uses
    texts of Python and of this package (code, reference, prose in eight languages) and the texts given. Without --out
    the file is kept where those presets find it; with it they take it as `calibrated-16:calibration=FILE`.

    InfiniGen: measures the prediction of queries, and fits corrections on every other window. Columns have the
    attention mass of a tenth of a layer's tokens, chosen by true queries (oracle), by the paper's prediction (input),
    by this package's (stream), and by the latter with the correction (corrected). The cache takes the file as
    `InfiniGenCache(model, calibration="FILE")`.

    oscar: fits the rotations of the baseline `oscar-2bit`, which takes the file as `oscar-2bit:calibration=FILE`.

    \b
    Examples:
        kvcache-plugins calibrate --model smollm2
        kvcache-plugins calibrate --model smollm2 --text-file book.txt
        kvcache-plugins compare --cache calibrated-16 --prompt-file book.txt
        kvcache-plugins calibrate --cache infinigen --text-file book.txt --out smollm2.safetensors
        kvcache-plugins compare --cache infinigen:calibration=smollm2.safetensors --prompt-file book.txt
    """
    _check_options(cache, text_file, out, has_infinigens=rank is not None or min_recall is not None)
    rank = 128 if rank is None else rank
    min_recall = 0.9 if min_recall is None else min_recall
    default_windows, default_length = _DEFAULTS[cache]
    windows = windows or default_windows
    length = length or default_length
    texts = [inputs.read_text(path, "text_file") for path in text_file or ()]
    if out is not None:
        prepare_file(out)
    from kvcache_plugins.transform_coding.calibration import calibration_path
    from kvcache_plugins.transform_coding.calibration_texts import calibration_texts

    loaded, tokenizer = inputs.load_for_evaluation(model, dtype, device)
    if cache != "infinigen":
        texts = [*calibration_texts().values(), *texts]
    cut = _cut_windows(texts, tokenizer, windows, length)
    settings: dict[str, object] = {
        "model": model,
        "text_file": ",".join(path.name for path in text_file) if text_file else None,
        "windows": windows,
        "length": length,
        "dtype": str(loaded.dtype).removeprefix("torch."),
    }
    if cache == "infinigen":
        settings |= {"rank": rank, "min_recall": min_recall}
    path = calibration_path(loaded) if out is None else out
    reports = _calibrate(cache, loaded, cut, path, rank, min_recall)
    if as_json:
        layers = [asdict(report) for report in reports]
        print_json({**provenance(loaded.device), "settings": settings, "file": str(path), "layers": layers})
    elif cache == "infinigen":
        _print_reports(f"{model}: {path}", reports)
    else:
        typer.echo(f"{model}: {path}")


def _check_options(cache: str, text_file: list[Path] | None, out: Path | None, *, has_infinigens: bool) -> None:
    """Raise a `ValueError` for an unknown method, an option that it needs, or options of InfiniGen for another."""
    from kvcache_plugins.option_checks import check_choice

    check_choice("cache", cache, tuple(_DEFAULTS))
    if out is None and cache != "transform":
        raise ValueError(f"`out` has to be given with `cache` {cache}: a safetensors file to write")
    if not text_file and cache == "infinigen":
        raise ValueError("`text_file` has to be given with `cache` infinigen: text like what the model will read")
    if has_infinigens and cache != "infinigen":
        raise ValueError(f"`rank` and `min_recall` are of `cache` infinigen, but it is {cache}")


def _cut_windows(
    texts: list[str], tokenizer: "PreTrainedTokenizerBase", windows: int, length: int
) -> "list[torch.Tensor]":
    """Cut windows of `length` tokens out of every text."""
    from kvcache_plugins.eval.harness import encode_text, spread_windows

    cut = []
    for token_ids, start_ids in (encode_text(tokenizer, text) for text in texts):
        cut += spread_windows(token_ids, windows, length // 2, length - length // 2 - 1, start_ids)
    return cut


def _calibrate(
    cache: str, model: "PreTrainedModel", windows: "list[torch.Tensor]", path: Path, rank: int, min_recall: float
) -> "Sequence[LayerReport]":
    """Calibrate a method, write its file, and return the reports of InfiniGen's layers."""
    from kvcache_plugins.baselines.oscar_rotations import calibrate_rotations, save_rotations
    from kvcache_plugins.infinigen.calibration import calibrate
    from kvcache_plugins.transform_coding.calibration import calibrate_transform

    path.parent.mkdir(parents=True, exist_ok=True)
    with track_progress(len(windows)) as announce:
        if cache == "transform":
            calibrate_transform(model, windows, on_progress=announce).save(path)
            return ()
        if cache == "oscar":
            save_rotations(calibrate_rotations(model, windows, on_progress=announce), path)
            return ()
        calibration = calibrate(model, windows, rank=rank, min_recall=min_recall, on_progress=announce)
        calibration.save(path)
        return calibration.reports


def _print_reports(title: str, reports: "Sequence[LayerReport]") -> None:
    columns = {"layer": "number", "oracle": "number", "input": "number", "stream": "number"}
    columns |= {"corrected": "number", "choice": "name", "recall": "number"}
    cells = []
    for each in reports:
        masses = (each.oracle, each.by_input, each.by_stream, each.corrected)
        cells.append((str(each.layer_idx), *(f"{mass:.4f}" for mass in masses), each.choice, f"{each.recall:.4f}"))
    open_console().print(make_table(title, columns, cells))
