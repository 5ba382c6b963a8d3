"""`kvcache-plugins eval`: lm-eval's own command line with the model `kvcache` in it, and this project's measures.

    kvcache-plugins eval run --model kvcache --model_args pretrained=smollm2,cache=gear-2bit --tasks kv_copa

`python -m kvcache_plugins.eval` is the same.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import typer

from kvcache_plugins.console.command_group import CommandGroup
from kvcache_plugins.console.command_line import user_errors, with_user_errors

from . import report
from .measures import fidelity, perplexity, retrieval
from .sweeps import sweep
from .tasks import FOLDER, task_files


# The commands of lm-eval that are handed on as they are
LM_EVAL_COMMANDS = {
    "run": """Evaluate a model on tasks: lm-eval's own command, with the model `kvcache`.

\b
Examples:
    kvcache-plugins eval run --model kvcache --model_args pretrained=smollm2,cache=gear-2bit --tasks kv_copa
    kvcache-plugins eval run --model kvcache --model_args pretrained=smollm2 --tasks kv_piqa,kv_rte --limit 100
""",
    "ls": """List lm-eval's tasks, this project's (kv_*) among them.

\b
Examples:
    kvcache-plugins eval ls tasks
""",
    "validate": """Check files of tasks.

\b
Examples:
    kvcache-plugins eval validate --tasks kv_copa
""",
}
_MEASURES: dict[str, Callable[..., None]] = {
    "fidelity": fidelity.main,
    "perplexity": perplexity.main,
    "retrieval": retrieval.main,
    "sweep": sweep.main,
    "report": report.main,
}


class _Group(CommandGroup):
    """Options without a command are those of `run`, as in lm-eval."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0].startswith("-") and args[0] not in ("--help", "-h"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


_HELP = """Evaluation with the cache in the loop: lm-eval's tasks, fidelity, perplexity, retrieval, sweeps.

`fidelity`, `perplexity` and `retrieval` write JSON: to a file with --out, to standard output with --json.

\b
Examples:
    kvcache-plugins eval run --model kvcache --model_args pretrained=smollm2,cache=gear-2bit --tasks kv_copa
    kvcache-plugins eval fidelity --text-file book.txt --cache gear-2bit --json
"""

app = typer.Typer(cls=_Group, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, help=_HELP)


def run_lm_eval(arguments: Sequence[str]) -> None:
    """
    Runs lm-eval's command line with the model `kvcache` registered and this project's tasks known by name.

    Args:
        arguments (`Sequence[str]`): As after `lm_eval`.
    """
    if find_spec("lm_eval") is None:
        raise ImportError("`eval` needs lm-eval: `pip install 'kvcache-plugins[eval]'`")
    from lm_eval.__main__ import cli_evaluate

    from . import lm_eval_model  # noqa: F401 - registers the model

    sys.argv = ["lm_eval", *_with_task_files(arguments)]
    cli_evaluate()


def _with_task_files(arguments: Sequence[str]) -> list[str]:
    """Names of this project's tasks replaced by their files, which lm-eval reads wherever they are."""
    if arguments and arguments[0] != "run":
        has_path = any(each.split("=")[0] == "--include_path" for each in arguments)
        return [*arguments, *([] if has_path else ["--include_path", str(FOLDER)])]
    files, replaced, is_task = task_files(), [], False
    for each in arguments:
        option, separator, value = each.partition("=")
        if each.startswith("-"):
            is_task = option in ("--tasks", "-t")
            each = f"{option}={_replace(value, files)}" if is_task and separator else each
        elif is_task:
            each = _replace(each, files)
        replaced.append(each)
    return replaced


def _replace(names: str, files: dict[str, Any]) -> str:
    return ",".join(str(files.get(name, name)) for name in names.split(","))


def _add_lm_eval_command(name: str, help_text: str) -> None:
    settings = {"allow_extra_args": True, "ignore_unknown_options": True}

    @app.command(name, help=help_text, context_settings=settings, add_help_option=False)
    def command(context: typer.Context) -> None:
        # lm-eval's own help knows its options; ours stands before it
        if {"--help", "-h"} & {*context.args}:
            typer.echo(f"{context.get_help()}\n")
        with user_errors():
            run_lm_eval([name, *context.args])


for _name, _help in LM_EVAL_COMMANDS.items():
    _add_lm_eval_command(_name, _help)
for _name, _function in _MEASURES.items():
    app.command(_name)(with_user_errors(_function))
