"""`kvcache-plugins bench store`: options and help; what it does stands in `eval.benchmarks.store`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcache_plugins.console.json_output import with_results


@with_results
def main(
    text_file: Annotated[Path, typer.Option(help="A text of three documents' tokens at least.")],
    way: Annotated[list[str], typer.Option(help="none, pickle, or a GEAR cache's NAME; repeatable.")] = [  # noqa: B006
        "none",
        "pickle",
        "gear",
        "gear-4bit",
    ],
    scenario: Annotated[list[str], typer.Option(help="again, questions, documents or chat; repeatable.")] = [  # noqa: B006
        "again",
        "questions",
        "documents",
        "chat",
    ],
    model: Annotated[str, typer.Option(help="Short name, folder or hub name.")] = "smollm2",
    document: Annotated[int, typer.Option(help="Tokens of a document.", min=8)] = 8000,
    questions: Annotated[int, typer.Option(help="Questions to a document.", min=1)] = 20,
    question_tokens: Annotated[int, typer.Option(help="Tokens of a question, or of a turn.", min=1)] = 32,
    turns: Annotated[int, typer.Option(help="Turns of a chat.", min=1)] = 12,
    new_tokens: Annotated[int, typer.Option(help="Tokens of an answer.", min=1)] = 16,
    unaided: Annotated[
        int | None, typer.Option(help="Prompts of a scenario that `none` answers at most; all if not given.", min=1)
    ] = None,
    num_threads: Annotated[int | None, typer.Option(help="Of the CPU; PyTorch's default if not given.", min=1)] = None,
) -> dict[str, Any]:
    """Time the first token of prompts that were read before.

    Those who read them are processes that have ended. Without a store, with a pickled DynamicCache, and with a prompt
    store of GEAR caches.

    \b
    Examples:
        kvcache-plugins bench store --text-file book.txt --out store.json
        kvcache-plugins bench store --text-file book.txt --scenario again --way gear --document 2000
    """
    from kvcache_plugins.eval.benchmarks.store import benchmark_store

    return benchmark_store(
        text_file=text_file,
        way=way,
        scenario=scenario,
        model=model,
        document=document,
        questions=questions,
        question_tokens=question_tokens,
        turns=turns,
        new_tokens=new_tokens,
        unaided=unaided,
        num_threads=num_threads,
    )
