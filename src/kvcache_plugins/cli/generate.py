"""`kvcache-plugins generate` and `compare`: one prompt through one cache, or through several."""

import itertools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from kvcache_plugins.console import inputs
from kvcache_plugins.console.commands import FAILED
from kvcache_plugins.console.display import print_line, track_progress
from kvcache_plugins.console.results import free_stdout, print_json, provenance
from kvcache_plugins.models.packaged_models import check_model_name
from kvcache_plugins.registry import check_cache, check_caches, create_cache, parse_cache_spec


if TYPE_CHECKING:
    import torch
    from transformers import Cache, PreTrainedModel

    from kvcache_plugins.prompt_store import PromptStore

DEMO_CACHES = ("dynamic", "transform", "transform-16", "gear", "kivi-2bit")


def generate(
    model: inputs.ModelOption = "smollm2",
    cache: Annotated[
        str | None, typer.Option(help="NAME or NAME:key=value,key=value; `transform` by default.")
    ] = None,
    max_kl: Annotated[
        float | None, typer.Option(help="Instead of --cache: the cheapest preset of at most this KL.")
    ] = None,
    store: Annotated[Path | None, typer.Option(help="Prompt store's folder: known tokens are not read again.")] = None,
    prompt: inputs.PromptOption = None,
    prompt_file: inputs.PromptFileOption = None,
    max_new_tokens: inputs.MaxNewTokensOption = 64,
    chat: inputs.ChatOption = False,
    dtype: inputs.DtypeOption = None,
    device: inputs.DeviceOption = None,
    seed: inputs.SeedOption = 42,
    temperature: Annotated[float | None, typer.Option(help="Sample at this temperature; greedy by default.")] = None,
    as_json: inputs.JsonOption = False,
) -> None:
    """Continue a prompt through a cache.

    The text is streamed; bytes held and speed follow on standard error.

    With --max-kl the KL of each preset to a dense cache is measured on the prompt's last tokens, and the choice is
    printed on standard error; the prompt has to have about a hundred tokens for it. With --json the text is streamed
    to standard error.

    \b
    Examples:
        kvcache-plugins generate --cache transform --prompt "The three laws of robotics are"
        kvcache-plugins generate --cache transform-16 --prompt-file notes.txt
        kvcache-plugins generate --chat --prompt "Why is the sky blue?" --max-new-tokens 200 --temperature 0.7
        cat paper.txt | kvcache-plugins generate --prompt-file - --prompt "In one sentence:"
        kvcache-plugins generate --store prompts --prompt-file LICENSE --prompt "In short, this licence"
        kvcache-plugins generate --max-kl 0.02 --prompt-file LICENSE --prompt "In short, this licence"
    """
    _check_options(cache, max_kl, store, temperature)
    check_model_name(model)
    name, options = parse_cache_spec("transform" if cache is None else cache)
    check_cache(name, **options)
    text = inputs.read_prompt(prompt, prompt_file)
    kept = None if store is None else _open_store(store, name)
    from transformers import TextStreamer

    from kvcache_plugins.eval.measures.comparison import generate_with, summary_line
    from kvcache_plugins.reports.memory import measure_memory

    loaded, tokenizer = inputs.load_for_evaluation(model, dtype, device)
    token_ids = inputs.encode_prompt(tokenizer, text, chat)
    made = _make(loaded, token_ids, name, options, kept) if max_kl is None else _choose(loaded, token_ids, max_kl)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    run = partial(generate_with, loaded, token_ids, made.cache, max_new_tokens=max_new_tokens, seed=seed)
    with free_stdout(as_json), _show_reading(loaded, token_ids.numel() - made.cache.get_seq_length()):
        generation = run(temperature=temperature, streamer=streamer)
    generation["prefill_seconds"] += made.reading_seconds
    memory = measure_memory(made.cache)
    print_line(summary_line(made.name, token_ids.numel(), generation, memory, made.num_known), stderr=True)
    if as_json:
        settings = {"model": model, "cache": made.name, "options": options, "max_kl": max_kl, "chat": chat}
        settings |= {"seed": seed, "dtype": str(loaded.dtype).removeprefix("torch."), "temperature": temperature}
        settings |= {"num_prompt_tokens": token_ids.numel(), "max_new_tokens": max_new_tokens}
        content = {name: value for name, value in generation.items() if name != "was_exercised"}
        text = str(tokenizer.decode(generation["token_ids"], skip_special_tokens=True))
        print_json({**provenance(loaded.device), "settings": settings, "text": text, **content})


def _check_options(cache: str | None, max_kl: float | None, store: Path | None, temperature: float | None) -> None:
    """Raise a `ValueError` for options that exclude each other, or are out of range."""
    if max_kl is not None and cache is not None:
        raise ValueError("`max_kl` chooses the cache: give it, or `cache`, but not both")
    if max_kl is not None and store is not None:
        raise ValueError("`store` keeps prompts by the cache that they are read through: give `cache`, not `max_kl`")
    from kvcache_plugins.option_checks import check_number

    check_number("max_kl", max_kl, above=0, is_optional=True)
    check_number("temperature", temperature, above=0, is_optional=True)


def _open_store(store: Path, name: str) -> "PromptStore":
    """Open a prompt store before the model is loaded; a `ValueError` if it cannot keep the cache."""
    from kvcache_plugins.packed.cache import makes_packed_cache
    from kvcache_plugins.prompt_store import PromptStore

    if not makes_packed_cache(name):
        raise ValueError(f"`store` keeps presets of `TransformCodingCache` and `GEARCache`, but `cache` is `{name}`")
    try:
        return PromptStore(store)
    except ValueError as error:
        raise ValueError(f"`store`: {str(error).removeprefix('`folder`: ')}") from error


class _Made(NamedTuple):
    """
    A cache and its name. From a store it has `num_known` tokens of the prompt, and the others were read in some
    seconds.
    """

    cache: "Cache"
    name: str
    num_known: int | None = None
    reading_seconds: float = 0.0


def _choose(model: "PreTrainedModel", token_ids: "torch.Tensor", max_kl: float) -> _Made:
    """Make the cache that `choose_cache` chooses, and print the choice."""
    from kvcache_plugins.advice.choose_by_kl import choose_cache
    from kvcache_plugins.eval.measures.comparison import choice_line

    made = choose_cache(model, token_ids[None], max_kl=max_kl)
    assert made.choice is not None
    print_line(choice_line(made.choice), stderr=True)
    return _Made(made, made.choice.preset)


def _make(
    model: "PreTrainedModel",
    token_ids: "torch.Tensor",
    name: str,
    options: Mapping[str, object],
    kept: "PromptStore | None",
) -> _Made:
    """Make an empty cache, or one from a store, into which the tokens that the store lacks are read."""
    if kept is None:
        return _Made(create_cache(name, model, **options), name)
    from kvcache_plugins.eval.harness import time_call
    from kvcache_plugins.eval.measures.comparison import choose_clock

    prompt = token_ids[None]
    made = kept.cache_for(model, prompt, name, **options)
    num_known = made.get_seq_length()
    length = made.record.length
    num_blocks = (token_ids.numel() - 1) // length - num_known // length
    with _show_reading(model, num_blocks * length, num_blocks):
        seconds = time_call(lambda: kept.prefill(model, made, prompt), model.device, choose_clock(model.device))
    stats = kept.stats()
    print_line(
        f"{num_known} of {token_ids.numel()} tokens were known, {stats['load_seconds']:.2f} s; "
        f"{stats['blocks_kept']} blocks kept, {stats['bytes_kept'] / 1e6:.1f} MB",
        stderr=True,
    )
    return _Made(made, name, num_known, seconds)


@contextmanager
def _show_reading(model: "PreTrainedModel", num_tokens: int, num_forwards: int = 1) -> Iterator[None]:
    """Show the progress of reading a prompt, by layers, until the last layer begins its last forward."""
    from torch.nn import ModuleList

    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = [each for each in model.modules() if isinstance(each, ModuleList) and len(each) == num_layers]
    layers = list(lists[0]) if lists else []
    steps = itertools.count(1)
    with ExitStack() as stack:
        announce = stack.enter_context(track_progress(num_forwards * num_layers))

        def note(*_: object) -> None:
            announce(f"reading {num_tokens:,} tokens")
            if next(steps) == num_forwards * num_layers:
                stack.close()

        for layer in layers if num_forwards else ():
            stack.callback(layer.register_forward_pre_hook(note).remove)
        yield


def compare(
    cache: Annotated[list[str] | None, typer.Option(help="NAME or NAME:key=value,key=value; repeatable.")] = None,
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

    `dynamic` always comes first. Columns are the text, the KL to the dense cache, bytes held and speed. KL is the mean
    over the dense cache's own continuation, fed through each cache after the prompt, and "top-1" the share of it at
    which both find the same token most likely. "differs at" is the first generated token that is not the dense
    cache's. KV % is of a cache at 16 bits, so the dense cache of a float32 model is at 200. Seconds and milliseconds
    are processor time on a CPU, all threads together. Exit code 1 if a cache failed on the way: its row says how.

    \b
    Examples:
        kvcache-plugins compare --prompt-file LICENSE --prompt "In short, this licence"
        kvcache-plugins compare --cache transform --cache gear:rank=8 --cache quanto-4bit --prompt-file book.txt
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
