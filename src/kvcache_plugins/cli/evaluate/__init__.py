"""`kvcache-plugins eval`: lm-eval's own command line with the model `kvcache` in it, and this project's measures.

    kvcache-plugins eval run --model kvcache --model_args pretrained=smollm2,cache=gear --tasks kv_copa

`python -m kvcache_plugins.eval` is the same.
"""

from typing import Any

from kvcache_plugins.console.lazy_group import LazyGroup, make_app


_HELP = """Evaluation with the cache in the loop.

That is lm-eval's tasks, fidelity, perplexity, retrieval and sweeps.

`fidelity`, `perplexity` and `retrieval` write JSON: to a file with --out, to standard output with --json.

\b
Examples:
    kvcache-plugins eval run --model kvcache --model_args pretrained=smollm2,cache=gear --tasks kv_copa
    kvcache-plugins eval fidelity --text-file book.txt --cache gear --json
"""


class EvaluateGroup(LazyGroup):
    """Commands of `kvcache-plugins eval`; options without a command are those of `run`, as in lm-eval."""

    lazy_commands = {
        "run": "kvcache_plugins.cli.evaluate.lm_eval:run",
        "ls": "kvcache_plugins.cli.evaluate.lm_eval:ls",
        "validate": "kvcache_plugins.cli.evaluate.lm_eval:validate",
        "fidelity": "kvcache_plugins.eval.measures.fidelity:evaluate_fidelity",
        "perplexity": "kvcache_plugins.eval.measures.perplexity:evaluate_perplexity",
        "retrieval": "kvcache_plugins.eval.measures.retrieval:evaluate_retrieval",
        "sweep": "kvcache_plugins.cli.evaluate.sweep:main",
        "report": "kvcache_plugins.eval.report:write_report",
    }

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0].startswith("-") and args[0] not in ("--help", "-h"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = make_app(EvaluateGroup, _HELP)
