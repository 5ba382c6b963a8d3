"""`kvcache-plugins bench`: the benchmarks of this folder as subcommands, each with the options of its own `main`."""

from collections.abc import Callable

import typer

from kvcache_plugins.console.command_group import CommandGroup
from kvcache_plugins.console.command_line import with_user_errors

from .benchmarks import compile as benchmark_compile
from .benchmarks import decode, infinigen, kernels, lm_eval, memory, prediction, prefix, step
from .gpu import command as gpu
from .runahead import benchmark as runahead
from .runahead import simulation as runahead_simulation


_COMMANDS: dict[str, Callable[..., None]] = {
    "kernels": kernels.main,
    "step": step.main,
    "decode": decode.main,
    "memory": memory.main,
    "prefix": prefix.main,
    "compile": benchmark_compile.main,
    "infinigen": infinigen.main,
    "predict": prediction.main,
    "gpu": gpu.main,
    "runahead": runahead.main,
    "runahead-simulation": runahead_simulation.main,
    "lm-eval": lm_eval.main,
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
