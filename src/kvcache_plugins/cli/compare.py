"""`kvcache-plugins compare`: several caches on one prompt."""

from typing import Annotated

import typer

from kvcache_plugins.console import inputs
from kvcache_plugins.console.commands import FAILED
from kvcache_plugins.console.results import print_json, provenance
from kvcache_plugins.models.packaged_models import check_model_name
from kvcache_plugins.registry import check_caches


DEMO_CACHES = ("dynamic", "gear", "gear-4bit", "gear-2bit", "kivi-2bit")


def main(
    cache: Annotated[
        list[str] | None,
        typer.Option(help="NAME or NAME:key=value,key=value; repeatable. `dynamic` always comes first."),
    ] = None,
    model: inputs.ModelOption = "smollm2",
    prompt: inputs.PromptOption = None,
    prompt_file: inputs.PromptFileOption = None,
    max_new_tokens: inputs.MaxNewTokensOption = 64,
    chat: inputs.ChatOption = False,
    dtype: inputs.DtypeOption = None,
    device: inputs.DeviceOption = None,
    seed: inputs.SeedOption = 42,
    as_json: inputs.JsonOption = False,
) -> None:
    """Run several caches on one prompt, side by side.

    Columns are the text, the KL to the dense cache, bytes held and speed. KL is the mean over the dense cache's
    own continuation, fed through each cache after the prompt, and "top-1" the share of it at which both find the same
    token most likely. "differs at" is the first generated token that is not the dense cache's. KV % is of a cache at
    16 bits, the ratio is to the model's dtype. Seconds and milliseconds are processor time on a CPU, all threads
    together. Exit code 1 if a cache failed on the way: its row says how.

    \b
    Examples:
        kvcache-plugins compare --prompt-file LICENSE --prompt "In short, this licence"
        kvcache-plugins compare --cache gear --cache gear-2bit:rank=8 --cache quanto-4bit --prompt-file book.txt
        kvcache-plugins compare --prompt-file book.txt --json > comparison.json
    """
    check_model_name(model)
    caches = check_caches(cache or DEMO_CACHES)
    text = inputs.read_prompt(prompt, prompt_file)
    from kvcache_plugins.eval.measures.comparison import compare_caches, print_rows

    loaded, tokenizer = inputs.load_for_evaluation(model, dtype, device)
    token_ids = inputs.encode_prompt(tokenizer, text, chat)
    rows = compare_caches(loaded, tokenizer, token_ids, caches, max_new_tokens=max_new_tokens, seed=seed)
    loaded_dtype = str(loaded.dtype).removeprefix("torch.")
    if as_json:
        settings = {"model": model, "dtype": loaded_dtype, "chat": chat, "seed": seed}
        settings.update(num_prompt_tokens=token_ids.numel(), max_new_tokens=max_new_tokens)
        print_json({**provenance(loaded.device), "settings": settings, "rows": rows})
    else:
        title = f"{model}, {loaded_dtype}, prompt of {token_ids.numel()} tokens, {max_new_tokens} new ones at most"
        print_rows(title, rows)
    if any(row["error"] for row in rows):
        raise typer.Exit(FAILED)
