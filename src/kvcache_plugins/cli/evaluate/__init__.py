"""`kvcache-plugins eval`: lm-eval's own command line with the model `kvcache` in it, and this project's measures.

    kvcache-plugins eval run --model kvcache --model_args pretrained=smollm2,cache=gear --tasks kv_copa

`python -m kvcache_plugins.eval` is the same.
"""

from typing import Any

from kvcache_plugins.console.lazy_group import LazyCommand, LazyGroup, make_app


_HELP = """Evaluation with the cache in the loop.

That is lm-eval's tasks, fidelity, perplexity, retrieval and sweeps.

`fidelity`, `perplexity` and `retrieval` write JSON: to a file with --out, to standard output with --json.

\b
Examples:
    kvcache-plugins eval run --model kvcache --model_args pretrained=smollm2,cache=gear --tasks kv_copa
    kvcache-plugins eval fidelity --text-file book.txt --cache gear --json
"""


class EvaluateGroup(LazyGroup):
    """What `kvcache-plugins eval` is followed by; options without a command are those of `run`, as in lm-eval."""

    lazy_commands = {
        "run": LazyCommand("kvcache_plugins.cli.evaluate.lm_eval:run", "Evaluate a model on tasks."),
        "ls": LazyCommand("kvcache_plugins.cli.evaluate.lm_eval:ls", "List lm-eval's tasks."),
        "validate": LazyCommand("kvcache_plugins.cli.evaluate.lm_eval:validate", "Check files of tasks."),
        "fidelity": LazyCommand(
            "kvcache_plugins.cli.evaluate.fidelity:main", "Measure how far caches are from the dense cache on a text."
        ),
        "perplexity": LazyCommand("kvcache_plugins.cli.evaluate.perplexity:main", "Perplexity against position."),
        "retrieval": LazyCommand(
            "kvcache_plugins.cli.evaluate.retrieval:main", "Ask for one line, or one value, of a long context."
        ),
        "sweep": LazyCommand("kvcache_plugins.cli.evaluate.sweep:main", "Measure caches x models x tasks."),
        "report": LazyCommand("kvcache_plugins.cli.evaluate.report:main", "Tables and figures of a result."),
    }

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0].startswith("-") and args[0] not in ("--help", "-h"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = make_app(EvaluateGroup, _HELP)
