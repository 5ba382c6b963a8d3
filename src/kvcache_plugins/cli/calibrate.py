"""`kvcache-plugins calibrate`: fit transform coding, InfiniGen or OSCAR to a model, once."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcache_plugins.console import inputs
from kvcache_plugins.console.display import make_table, open_console, track_progress
from kvcache_plugins.console.results import prepare_file, print_json, provenance


# Windows of every text, and tokens of a window
_DEFAULTS = {"transform": (6, 512), "oscar": (6, 512), "infinigen": (8, 1024)}


def main(
    text_file: Annotated[list[Path] | None, typer.Option(help="Text like what a model will read; repeatable.")] = None,
    out: Annotated[Path | None, typer.Option(help="safetensors file to write; transform has a default.")] = None,
    cache: Annotated[str, typer.Option(help="transform, infinigen or oscar.")] = "transform",
    model: inputs.ModelOption = "smollm2",
    windows: Annotated[int | None, typer.Option(help="Windows of every text (6; infinigen 8).", min=1)] = None,
    length: Annotated[int | None, typer.Option(help="Tokens a window (512; infinigen 1024).", min=4)] = None,
    rank: Annotated[int, typer.Option(help="infinigen: rank of the corrections; 0 for none.", min=0)] = 128,
    min_recall: Annotated[float, typer.Option(help="infinigen: layers below it stay whole.", min=0, max=1)] = 0.9,
    dtype: inputs.DtypeOption = None,
    device: inputs.DeviceOption = None,
    as_json: inputs.JsonOption = False,
) -> None:
    """Calibrate transform coding, InfiniGen or OSCAR.

    transform: finds the bases that the presets `calibrated-12`, `calibrated-16`, ... code keys and values in, and how
    much their errors cost. The first half of a window fills a cache, the other measures the effect of errors. It uses
    texts of Python and of this package (code, reference, prose in eight languages) and the texts given. Without --out
    the file is kept where those presets find it; with it they take it as `calibrated-16:calibration=FILE`.

    InfiniGen: measures how well it speculates, and fits corrections; every other window is only measured. The figures
    are, of each layer, the attention mass that a tenth of the tokens captures, chosen by the true queries (oracle), by
    the paper's guess (input), by ours (stream), and by ours with the correction. The cache takes the file as
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
    from kvcache_plugins.option_checks import check_choice

    check_choice("cache", cache, tuple(_DEFAULTS))
    if out is None and cache != "transform":
        raise ValueError(f"`out` has to be given with `cache` {cache}: a safetensors file to write")
    if not text_file and cache == "infinigen":
        raise ValueError("`text_file` has to be given with `cache` infinigen: text like what the model will read")
    windows, length = windows or _DEFAULTS[cache][0], length or _DEFAULTS[cache][1]
    texts = [inputs.read_text(path, "text_file") for path in text_file or ()]
    if out is not None:
        prepare_file(out)
    from kvcache_plugins.baselines.oscar_rotations import calibrate_rotations, save_rotations
    from kvcache_plugins.eval.harness import encode_text, spread_windows
    from kvcache_plugins.infinigen.calibration import calibrate
    from kvcache_plugins.transform_coding.calibration import calibrate_transform, calibration_path
    from kvcache_plugins.transform_coding.calibration_texts import calibration_texts

    loaded, tokenizer = inputs.load_for_evaluation(model, dtype, device)
    if cache != "infinigen":
        texts = [*calibration_texts().values(), *texts]
    cut: list[Any] = []
    for token_ids, start_ids in (encode_text(tokenizer, text) for text in texts):
        cut += spread_windows(token_ids, windows, length // 2, length - length // 2 - 1, start_ids)
    names = ",".join(path.name for path in text_file) if text_file else None
    settings: dict[str, object] = {"model": model, "text_file": names}
    settings |= {"windows": windows, "length": length, "dtype": str(loaded.dtype).removeprefix("torch.")}
    layers: list[dict[str, object]] = []
    path = calibration_path(loaded) if out is None else out
    path.parent.mkdir(parents=True, exist_ok=True)
    with track_progress(len(cut)) as announce:
        if cache == "transform":
            calibrate_transform(loaded, cut, on_progress=announce).save(path)
        elif cache == "oscar":
            save_rotations(calibrate_rotations(loaded, cut, on_progress=announce), path)
        else:
            calibration = calibrate(loaded, cut, rank=rank, min_recall=min_recall, on_progress=announce)
            calibration.save(path)
            settings |= {"rank": rank, "min_recall": min_recall}
            layers = [asdict(report) for report in calibration.reports]
    if as_json:
        print_json({**provenance(loaded.device), "settings": settings, "file": str(path), "layers": layers})
    elif cache != "infinigen":
        typer.echo(f"{model}: {path}")
    else:
        columns = {"layer": "number", "oracle": "number", "input": "number", "stream": "number"}
        columns |= {"corrected": "number", "choice": "name", "recall": "number"}
        cells = []
        for each in calibration.reports:
            masses = (each.oracle, each.by_input, each.by_stream, each.corrected)
            cells.append((str(each.layer_idx), *(f"{mass:.4f}" for mass in masses), each.choice, f"{each.recall:.4f}"))
        open_console().print(make_table(f"{model}: {path}", columns, cells))
