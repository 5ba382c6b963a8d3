"""`kvcache-plugins bench`: the benchmarks of this folder as subcommands, each with the options of its own `main`."""

from collections.abc import Callable

import typer

from . import (
    benchmark_compile,
    benchmark_decode,
    benchmark_infinigen,
    benchmark_kernels,
    benchmark_lm_eval,
    benchmark_memory,
    benchmark_prefix,
    benchmark_step,
    prediction,
)
from .command_group import CommandGroup
from .command_line import with_user_errors
from .gpu import command as gpu
from .runahead import benchmark as benchmark_runahead
from .runahead import simulation as runahead_simulation


_COMMANDS: dict[str, Callable[..., None]] = {
    "kernels": benchmark_kernels.main,
    "step": benchmark_step.main,
    "decode": benchmark_decode.main,
    "memory": benchmark_memory.main,
    "prefix": benchmark_prefix.main,
    "compile": benchmark_compile.main,
    "infinigen": benchmark_infinigen.main,
    "predict": prediction.main,
    "gpu": gpu.main,
    "runahead": benchmark_runahead.main,
    "runahead-simulation": runahead_simulation.main,
    "lm-eval": benchmark_lm_eval.main,
}


_HELP = """Benchmarks: attention alone, whole decode steps, long decodes, memory, one prefix for many.

Each writes its numbers as JSON: to a file with --out, to standard output with --json (`gpu`: files in a folder).

\b
Examples:
    kvcache-plugins bench kernels
    kvcache-plugins bench step --cache dynamic --cache gear-2bit --text-file book.txt --json | jq .rows
"""

app = typer.Typer(
    cls=CommandGroup, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, help=_HELP
)
for _name, _function in _COMMANDS.items():
    app.command(_name)(with_user_errors(_function))
