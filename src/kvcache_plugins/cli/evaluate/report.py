"""`kvcache-plugins eval report`: options and help; what it does stands in `eval.report`."""

from pathlib import Path
from typing import Annotated

import typer


def main(
    result: Annotated[Path, typer.Argument(help="A folder that a sweep has filled, or the JSON file of one result.")],
    out: Annotated[Path | None, typer.Option(help="Markdown file to write; printed by default.")] = None,
    figures: Annotated[Path | None, typer.Option(help="Folder to draw figures into.")] = None,
) -> None:
    """Tables and figures of a result.

    There are figures of a sweep, of `bench step`, of `bench llama-cpp` and of `eval fidelity`. A sweep gives accuracy
    against bytes, perplexity against position and memory by part; benchmarks of steps give time against context;
    `eval fidelity` divergence from the dense cache against bytes.

    \b
    Examples:
        kvcache-plugins eval report eval/results/gear --figures docs/figures
        kvcache-plugins eval report eval/results/step_smollm2_cpu.json --figures docs/figures
    """
    from kvcache_plugins.eval.report import write_report

    write_report(
        result=result,
        out=out,
        figures=figures,
    )
