"""`kvcache-plugins eval`: lm-eval's own command line with the model `kvcache` in it, and this project's measures.

    kvcache-plugins eval run --model kvcache --model_args pretrained=smollm2,cache=transform --tasks kv_copa

`python -m kvcache_plugins.eval` is the same. Commands of lm-eval get their arguments unchanged. Their help is written
here, so that it does not import lm-eval.
"""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kvcache_plugins.console.commands import FAILED, fold_examples, make_app, user_errors
from kvcache_plugins.console.inputs import JsonOption
from kvcache_plugins.console.results import free_stdout, print_json


_HELP = """Evaluation with the cache in the loop.

Measures are lm-eval's tasks, fidelity, order, perplexity and retrieval; sweeps combine them.

`fidelity`, `order`, `perplexity` and `retrieval` write JSON: to a file with --out, to standard output with --json.

\b
Examples:
    kvcache-plugins eval run --model kvcache --model_args pretrained=smollm2,cache=transform --tasks kv_copa
    kvcache-plugins eval fidelity --text-file book.txt --cache transform --json
"""


app = make_app(
    {
        "run": "kvcache_plugins.cli.evaluate:run",
        "ls": "kvcache_plugins.cli.evaluate:ls",
        "validate": "kvcache_plugins.cli.evaluate:validate",
        "fidelity": "kvcache_plugins.eval.measures.commands:evaluate_fidelity",
        "repetition": "kvcache_plugins.eval.measures.commands:evaluate_repetition",
        "order": "kvcache_plugins.eval.measures.commands:evaluate_order",
        "perplexity": "kvcache_plugins.eval.measures.commands:evaluate_perplexity",
        "retrieval": "kvcache_plugins.eval.measures.commands:evaluate_retrieval",
        "sweep": "kvcache_plugins.cli.evaluate:sweep",
        "report": "kvcache_plugins.eval.commands:write_report",
    },
    _HELP,
)
# Commands of lm-eval: a summary, and examples
LM_EVAL_COMMANDS = {
    "run": (
        "Evaluate a model on tasks.\n\nThis is lm-eval's own command, with the model `kvcache`.",
        "--model kvcache --model_args pretrained=smollm2,cache=transform --tasks kv_copa",
        "--model kvcache --model_args pretrained=smollm2 --tasks kv_piqa,kv_rte --limit 100",
    ),
    "ls": ("List lm-eval's tasks.\n\nThis project's (kv_*) are among them.", "tasks", "groups", "tags"),
    "validate": ("Check files of tasks.", "--tasks kv_copa"),
}


def _hand_on(name: str) -> typer.Typer:
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    summary, *examples = LM_EVAL_COMMANDS[name]
    lines = "".join(f"    kvcache-plugins eval {name} {each}\n" for each in examples)
    text = f"{summary}\n\n\b\nExamples:\n{lines}\b\nMore of lm-eval's options: `lm_eval {name} --help`.\n"
    settings = {"allow_extra_args": True, "ignore_unknown_options": True}

    @app.command(name, help=fold_examples(text), context_settings=settings, add_help_option=False)
    def command(context: typer.Context) -> None:
        if {"--help", "-h"} & {*context.args}:
            typer.echo(context.get_help())
            return
        from kvcache_plugins.eval.tasks import run_lm_eval

        with user_errors():
            run_lm_eval([name, *context.args])

    return app


run, ls, validate = map(_hand_on, LM_EVAL_COMMANDS)


def sweep(
    config: Annotated[Path, typer.Argument(help="A YAML file: models, caches, measures and where results go.")],
    only: Annotated[str, typer.Option(help="Shell pattern of measure/model/cache, such as 'copa/*/gear*'.")] = "*",
    again: Annotated[bool, typer.Option("--again", help="Repeat runs that have a result.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would run.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure caches x models x tasks. An interrupted sweep can be continued.

    Every run has a JSON file. --json lists the runs that were done (with --dry-run, that would be), each with its file
    and, if it has failed, its error. Exit code 1 if a run has failed.

    \b
    Examples:
        kvcache-plugins eval sweep eval/sweeps/gear.yaml
        kvcache-plugins eval sweep eval/sweeps/gear.yaml --only 'copa/smollm2/gear-2bit' --again
    """
    from kvcache_plugins.console.display import print_line
    from kvcache_plugins.eval.sweep import Run, Sweep, run_sweep

    plan = Sweep.read(config)
    runs = plan.pending(only, again)
    print_line(f"{len(runs)} of {len(plan.runs)} runs to do, results in {plan.out}", stderr=True)
    done: list[tuple[Run, str | None]] = [(run, None) for run in runs] if dry_run else []
    with free_stdout(as_json):
        for run, error in () if dry_run else run_sweep(plan, runs, partial(print_line, stderr=True)):
            done.append((run, error))
            if error is not None:
                print_line(f"{run.label} failed: {error}", stderr=True)
    if as_json:
        rows = [{"run": run.label, "file": str(plan.out / run.file_name()), "error": error} for run, error in done]
        print_json({"num_runs": len(plan.runs), "runs": rows})
    elif dry_run:
        for run in runs:
            typer.echo(run.label)
    num_failed = sum(error is not None for _, error in done)
    if num_failed:
        print_line(f"{num_failed} runs failed; run the same again to retry them", stderr=True)
        raise typer.Exit(FAILED)
