"""`kvcache-plugins bench gpu`: options and help; what it does stands in `eval.gpu.command`."""

from pathlib import Path
from typing import Annotated

import typer


def main(
    out: Annotated[Path, typer.Option(help="Folder for the JSON files.")] = Path("eval/results"),
    limit: Annotated[float, typer.Option(help="Seconds that all of it may take.", min=1)] = 570.0,
    tiny: Annotated[bool, typer.Option("--tiny", help="Small sizes, to try the script; no GPU needed.")] = False,
    part: Annotated[str | None, typer.Option(help="One part only, in this process: checks, presets, ...")] = None,
) -> None:
    """Check and time all that wants a GPU. For the root of the repository, whose tests it runs.

    \b
    Examples:
        kvcache-plugins bench gpu
        kvcache-plugins bench gpu --part attention --out /tmp/results
        TRITON_INTERPRET=1 KVCACHE_PLUGINS_KERNELS=triton kvcache-plugins bench gpu --tiny --out /tmp/results
    """
    from kvcache_plugins.eval.gpu.command import run_on_gpu

    run_on_gpu(
        out=out,
        limit=limit,
        tiny=tiny,
        part=part,
    )
