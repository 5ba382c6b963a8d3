"""`kvcache-plugins bench lm-eval`: options and help; what it does stands in `eval.benchmarks.lm_eval`."""

from typing import Annotated, Any

import typer

from kvcache_plugins.console.json_output import with_results


@with_results
def main(
    task: Annotated[str, typer.Option(help="A task of log-likelihoods: kv_piqa, a YAML file, or one of lm-eval's.")],
    cache: Annotated[list[str], typer.Option(help="NAME or NAME:key=value,...; repeatable.")] = ["dynamic"],  # noqa: B006
    mode: Annotated[list[str], typer.Option(help="Of `cache_mode`; repeatable.")] = ["auto"],  # noqa: B006
    model: Annotated[str, typer.Option(help="Short name, folder or hub name.")] = "smollm2",
    limit: Annotated[int, typer.Option(help="Items.", min=1)] = 50,
    num_fewshot: Annotated[
        int | None, typer.Option(help="Examples before each; the task's own by default.", min=0)
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Of both models.", min=1)] = 1,
    max_length: Annotated[int | None, typer.Option(help="Tokens of a window; the model's by default.", min=1)] = None,
    rounds: Annotated[int, typer.Option(help="Runs of every model, taking turns.", min=1)] = 3,
    dtype: Annotated[str | None, typer.Option(help="float32 (default on CPU), bfloat16 or float16.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; by default a GPU where there is one.")] = None,
) -> dict[str, Any]:
    """lm-eval's own model beside `kvcache`. Seconds on one task, and the largest difference of their scores.

    \b
    Examples:
        kvcache-plugins bench lm-eval --task kv_openbookqa --limit 50
        kvcache-plugins bench lm-eval --task kv_copa --limit 200 --mode prefix --mode chunk --mode decode --rounds 1
    """
    from kvcache_plugins.eval.benchmarks.lm_eval import benchmark_lm_eval

    return benchmark_lm_eval(
        task=task,
        cache=cache,
        mode=mode,
        model=model,
        limit=limit,
        num_fewshot=num_fewshot,
        batch_size=batch_size,
        max_length=max_length,
        rounds=rounds,
        dtype=dtype,
        device=device,
    )
