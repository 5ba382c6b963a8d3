"""`kvcache-plugins eval run`, `ls` and `validate`: lm-eval's own commands, handed on as they are."""

import typer

from kvcache_plugins.console.errors import user_errors


LM_EVAL_COMMANDS = {
    "run": """Evaluate a model on tasks.

This is lm-eval's own command, with the model `kvcache`.

\b
Examples:
    kvcache-plugins eval run --model kvcache --model_args pretrained=smollm2,cache=gear-2bit --tasks kv_copa
    kvcache-plugins eval run --model kvcache --model_args pretrained=smollm2 --tasks kv_piqa,kv_rte --limit 100
""",
    "ls": """List lm-eval's tasks.

This project's (kv_*) are among them.

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


def _hand_on(name: str) -> typer.Typer:
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    settings = {"allow_extra_args": True, "ignore_unknown_options": True}

    @app.command(name, help=LM_EVAL_COMMANDS[name], context_settings=settings, add_help_option=False)
    def command(context: typer.Context) -> None:
        # lm-eval's own help knows its options; ours stands before it
        if {"--help", "-h"} & {*context.args}:
            typer.echo(f"{context.get_help()}\n")
        from kvcache_plugins.eval.lm_eval_commands import run_lm_eval

        with user_errors():
            run_lm_eval([name, *context.args])

    return app


run, ls, validate = map(_hand_on, LM_EVAL_COMMANDS)
