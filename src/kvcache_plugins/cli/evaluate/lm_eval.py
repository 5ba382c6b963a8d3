"""`kvcache-plugins eval run`, `ls` and `validate`: lm-eval's own commands, handed on as they are.

Their help is ours: it names the options that are wanted most, and needs no import of lm-eval for it.
"""

import typer

from kvcache_plugins.console.errors import user_errors


LM_EVAL_COMMANDS = {
    "run": """Evaluate a model on tasks.

This is lm-eval's own command, with the model `kvcache`.

\b
Examples:
    kvcache-plugins eval run --model kvcache --model_args pretrained=smollm2,cache=gear --tasks kv_copa
    kvcache-plugins eval run --model kvcache --model_args pretrained=smollm2 --tasks kv_piqa,kv_rte --limit 100
\b
lm-eval's options that are wanted most (all of them: `lm_eval run --help`):
    --model NAME              kvcache, or another of lm-eval's, such as hf
    --model_args KEY=VALUE,.. pretrained=, cache=, dtype=, and the cache's own options
    --tasks NAME,..           what `kvcache-plugins eval ls tasks` lists
    --num_fewshot N           examples before each question
    --limit N                 of the documents of each task
    --batch_size N            sequences at a time
    --output_path FOLDER      where results are written
    --log_samples             write every answer too
    --apply_chat_template     ask as in a chat
    --config FILE             a YAML file with options
""",
    "ls": """List lm-eval's tasks.

This project's (kv_*) are among them.

\b
Examples:
    kvcache-plugins eval ls tasks
    kvcache-plugins eval ls groups
    kvcache-plugins eval ls tags
\b
More of lm-eval's options: `lm_eval ls --help`.
""",
    "validate": """Check files of tasks.

\b
Examples:
    kvcache-plugins eval validate --tasks kv_copa
\b
More of lm-eval's options: `lm_eval validate --help`.
""",
}


def _hand_on(name: str) -> typer.Typer:
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    settings = {"allow_extra_args": True, "ignore_unknown_options": True}

    @app.command(name, help=LM_EVAL_COMMANDS[name], context_settings=settings, add_help_option=False)
    def command(context: typer.Context) -> None:
        if {"--help", "-h"} & {*context.args}:
            typer.echo(context.get_help())
            return
        from kvcache_plugins.eval.lm_eval_commands import run_lm_eval

        with user_errors():
            run_lm_eval([name, *context.args])

    return app


run, ls, validate = map(_hand_on, LM_EVAL_COMMANDS)
