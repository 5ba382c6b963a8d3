"""`kvcache-plugins calibrate`: what InfiniGen can be told about a model beforehand."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcache_plugins.console.json_output import JsonOption, prepare_file, print_json
from kvcache_plugins.console.prompts import read_text
from kvcache_plugins.console.run_report import provenance

from .options import DeviceOption, DtypeOption, ModelOption


if TYPE_CHECKING:
    from kvcache_plugins.infinigen.calibration import LayerReport


def main(
    text_file: Annotated[Path, typer.Option(help="Text that is like what the model will read.")],
    out: Annotated[Path, typer.Option(help="safetensors file to write.")],
    model: ModelOption = "smollm2",
    windows: Annotated[int, typer.Option(help="Windows of the text; every other one is only measured.", min=2)] = 8,
    length: Annotated[int, typer.Option(help="Tokens a window.", min=4)] = 1024,
    rank: Annotated[int, typer.Option(help="Rank of the corrections; 0 for none.", min=0)] = 128,
    min_recall: Annotated[
        float, typer.Option(help="A layer of which less is captured stays whole.", min=0, max=1)
    ] = 0.9,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure how well InfiniGen speculates; fit corrections.

    The figures are, of each layer, the attention mass that a tenth of the tokens captures, chosen by the true queries
    (oracle), by the paper's guess (input), by ours (stream), and by ours with the correction. The cache takes the file
    as `InfiniGenCache(model, calibration="FILE")`.

    \b
    Examples:
        kvcache-plugins calibrate --model smollm2 --text-file book.txt --out smollm2.safetensors
        kvcache-plugins compare --cache infinigen:calibration=smollm2.safetensors --prompt-file book.txt
    """
    text = read_text(text_file, "text_file")
    prepare_file(out)
    from kvcache_plugins.console.loading import load_for_evaluation
    from kvcache_plugins.console.progress import track_progress
    from kvcache_plugins.eval.harness.windows import encode_text, spread_windows
    from kvcache_plugins.infinigen.calibration import calibrate

    loaded, tokenizer = load_for_evaluation(model, dtype, device)
    token_ids, start_ids = encode_text(tokenizer, text)
    cut = spread_windows(token_ids, windows, length // 2, length - length // 2 - 1, start_ids)
    with track_progress(len(cut)) as announce:
        calibration = calibrate(loaded, cut, rank=rank, min_recall=min_recall, on_progress=announce)
    calibration.save(out)
    if as_json:
        settings = {"model": model, "text_file": text_file.name, "windows": windows, "length": length, "rank": rank}
        settings |= {"min_recall": min_recall, "dtype": str(loaded.dtype).removeprefix("torch.")}
        layers = [asdict(report) for report in calibration.reports]
        print_json({**provenance(loaded.device), "settings": settings, "file": str(out), "layers": layers})
    else:
        _show(f"{model}: {out}", calibration.reports)


def _show(title: str, reports: tuple[LayerReport, ...]) -> None:
    from kvcache_plugins.console.tables import make_table, open_console

    columns = {"layer": "number", "oracle": "number", "input": "number", "stream": "number", "corrected": "number"}
    columns |= {"choice": "name", "recall": "number"}
    open_console().print(make_table(title, columns, [_cells(report) for report in reports]))


def _cells(report: LayerReport) -> tuple[str, ...]:
    masses = (report.oracle, report.by_input, report.by_stream, report.corrected)
    return str(report.layer_idx), *(f"{mass:.4f}" for mass in masses), report.choice, f"{report.recall:.4f}"
