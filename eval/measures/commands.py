"""Commands of `kvcache-plugins eval` that measure a cache's answers: options, help and rows.

Help reads this module, so it imports nothing heavy at the top: a command imports what it runs.
"""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcache_plugins.console import inputs
from kvcache_plugins.console.display import track_progress
from kvcache_plugins.eval.benchmark import benchmark, loaded_settings
from kvcache_plugins.eval.rows import Found, Settings


@benchmark("fidelity", "{model} on {text_file}: {windows} x {scored} tokens scored after {prefix}, fewest bytes first")
def evaluate_fidelity(
    text_file: Annotated[Path, typer.Option(help="The text that windows are cut from.")],
    cache: inputs.CachesOption,
    model: inputs.ModelOption = "smollm2",
    windows: Annotated[int, typer.Option(help="Disjoint windows, spread evenly over the text.", min=1)] = 8,
    prefix: Annotated[int, typer.Option(help="Tokens that fill the cache, unscored.", min=1)] = 1024,
    scored: Annotated[int, typer.Option(help="Tokens scored through the filled cache.", min=1)] = 512,
    chunk: Annotated[
        int | None, typer.Option("--decoded", "--chunk", help="Tokens a forward; 1 decodes. All by default.", min=1)
    ] = None,
    own: Annotated[bool, typer.Option("--own", help="Score what the dense model samples, not the text.")] = False,
    batch: Annotated[int, typer.Option(help="Windows decoded side by side: the same figures, sooner.", min=1)] = 1,
    stretch: Annotated[
        int | None, typer.Option(help="Report KL and norms also by stretches of so many tokens.", min=1)
    ] = None,
    random_errors: Annotated[
        list[float] | None,
        typer.Option(help="Compare with a dense cache with random errors of so many bits; repeatable.", min=0),
    ] = None,
    dtype: inputs.DtypeOption = None,
    device: inputs.DeviceOption = None,
    seed: inputs.SeedOption = 42,
) -> Iterator[Found]:
    """Measure how far caches are from the dense cache on a text.

    Scored in one forward, new tokens see each other exactly; with --decoded 1 they are read back from the cache one by
    one. Bytes are those after the prefix, "% while decoding" the mean while tokens were scored, buffers included. KL
    is of the next token from the dense cache's, the mean (plus or minus its standard error), the median and the 99.9th
    percentile of all scored positions.

    \b
    Examples:
        kvcache-plugins eval fidelity --text-file wiki.test.raw --cache transform --cache kivi-4bit
        kvcache-plugins eval fidelity --text-file book.txt --windows 2 --batch 2 --decoded 1 \\
            --cache gear-2bit --cache gear-2bit:sparsity=0,rank=8 --out eval/results/rank.json
        kvcache-plugins eval fidelity --text-file book.txt --windows 1 --prefix 64 --scored 4096 --own \\
            --decoded 16 --stretch 256 --cache transform --cache kivi-4bit
    """
    import torch
    from transformers import set_seed

    from kvcache_plugins.eval import harness
    from kvcache_plugins.eval.inexact_cache import InexactCache

    from .fidelity import fidelity_fields, measure_fidelity

    if stretch is not None and scored < 4:
        raise ValueError(f"`stretch` compares quarters of at least 4 tokens in `scored`, but got {scored}")
    loaded, cut = harness.load_with_windows(model, text_file, (windows, prefix, scored), dtype, device)
    yield from loaded_settings(loaded)
    yield Settings(device=loaded.device.type)
    factories = harness.cache_factories(cache, loaded)
    for nbits in random_errors or ():
        name = f"random errors of {nbits:g} bits"
        factories[name] = partial(InexactCache, loaded, key_nbits=nbits, value_nbits=nbits)
    set_seed(seed)
    if own:
        writer: Any = loaded
        read = torch.stack(cut)[:, :prefix].to(loaded.device)
        length = {"max_new_tokens": scored + 1, "min_new_tokens": scored + 1}
        cut = list(writer.generate(read, attention_mask=torch.ones_like(read), do_sample=True, **length))
    with track_progress(math.ceil(windows / batch) * len(factories)) as announce:
        found = measure_fidelity(
            loaded,
            cut,
            factories,
            prefix_length=prefix,
            chunk=chunk,
            batch=batch,
            with_norms=stretch is not None,
            on_progress=announce,
        )
    rows = [fidelity_fields(spec, result, stretch) for spec, result in found.items()]
    yield from sorted(rows, key=lambda row: row["memory_after_prefix"]["total_bytes"])


@benchmark(
    "repetition", "{model} continues {windows} x {prefix} tokens of {text_file} by up to {tokens}", with_dense=True
)
def evaluate_repetition(
    text_file: Annotated[Path, typer.Option(help="The text that prompts are cut from.")],
    cache: inputs.CachesOption,
    model: inputs.ModelOption = "smollm2",
    windows: Annotated[int, typer.Option(help="Prompts, spread evenly over the text.", min=1)] = 8,
    prefix: Annotated[int, typer.Option(help="Tokens of a prompt.", min=1)] = 64,
    tokens: Annotated[int, typer.Option(help="Most tokens that are sampled behind it.", min=4)] = 2048,
    dtype: inputs.DtypeOption = None,
    device: inputs.DeviceOption = None,
    seed: inputs.SeedOption = 42,
) -> Iterator[Found]:
    """Measure repetition in what a model writes.

    All caches begin with the same prompts and seed, `dynamic` first. Columns are the share of 4-grams that are
    distinct, the mean and the least of all texts, and the length to the token that ends a text.

    \b
    Example:
        kvcache-plugins eval repetition --text-file book.txt --cache transform --cache kivi-4bit
    """
    import torch

    from kvcache_plugins.eval import harness

    from .repetition import measure_repetition

    loaded, prompts = harness.load_with_windows(model, text_file, (windows, prefix, 1), dtype, device)
    yield from loaded_settings(loaded)
    factories = harness.cache_factories(cache, loaded)
    read = torch.stack(prompts)[:, :prefix].to(loaded.device)
    with track_progress(len(factories)) as announce:
        yield from measure_repetition(loaded, read, factories, tokens, seed=seed, on_progress=announce)


@benchmark("order", "{model} on {text_file}: {scored} tokens scored behind {length}, {chunk} at a time")
def evaluate_order(
    text_file: Annotated[list[Path], typer.Option(help="Texts, a document of each; repeatable.")],
    cache: inputs.CachesOption,
    order: Annotated[list[str], typer.Option(help="prompt, turn:N or chunks:N; the first is compared with.")],
    model: inputs.ModelOption = "smollm2",
    length: Annotated[int, typer.Option(help="Tokens of a document, unscored.", min=1)] = 1000,
    windows: Annotated[int, typer.Option(help="Documents of each text.", min=1)] = 1,
    scored: Annotated[int, typer.Option(help="Tokens scored behind it.", min=1)] = 128,
    chunk: Annotated[int, typer.Option(help="Scored tokens a forward.", min=1)] = 16,
    then: Annotated[Path | None, typer.Option(help="Another text, which documents change to.")] = None,
    switch: Annotated[int, typer.Option(help="Tokens after which they do.", min=1)] = 2000,
    dtype: inputs.DtypeOption = None,
    device: inputs.DeviceOption = None,
) -> Iterator[Found]:
    """Measure KL by the order in which a document comes.

    Documents are cut from the middle of texts, or spread evenly if there are several of a text. All orders end with
    the same tokens, so that one dense forward is the reference of all.

    \b
    Examples:
        kvcache-plugins eval order --text-file wiki.test.raw --text-file book.txt --cache transform \\
            --order prompt --order turn:85 --order chunks:64 --out order.json
        kvcache-plugins eval order --text-file book.txt --then program.py --switch 2000 --length 3000 \\
            --cache transform --order prompt --order chunks:256
    """
    from kvcache_plugins.eval import harness

    from .order import cut_documents, measure_orders, updates_of

    for each in order:
        updates_of(each, length)
    read = [inputs.read_text(path, "text_file") for path in text_file]
    read_then = None if then is None else inputs.read_text(then, "then")
    loaded, tokenizer = inputs.load_for_evaluation(model, dtype, device)
    texts = [harness.encode_text(tokenizer, text) for text in read]
    others = None if read_then is None else harness.encode_text(tokenizer, read_then)[0]
    documents = cut_documents(texts, length + scored + 1, others, switch, windows)
    yield from loaded_settings(loaded)
    yield Settings(text_file=", ".join(path.name for path in text_file))
    factories = harness.cache_factories(cache, loaded)
    with track_progress(len(documents) * (1 + len(factories) * len(order))) as announce:
        yield from measure_orders(
            loaded, documents, factories, order, length=length, chunk=chunk, on_progress=announce
        )


@benchmark("perplexity", "{model} on {text_file}: {windows} x {length} tokens", with_dense=True)
def evaluate_perplexity(
    text_file: Annotated[Path, typer.Option(help="The text that windows are cut from.")],
    cache: inputs.CachesOption,
    model: inputs.ModelOption = "smollm2",
    length: Annotated[int, typer.Option(help="Tokens scored in each window.", min=2)] = 2048,
    windows: Annotated[int, typer.Option(help="Disjoint windows, spread evenly over the text.", min=1)] = 1,
    chunk: Annotated[int, typer.Option(help="Tokens a forward; 1 is decode.", min=1)] = 1,
    stretch: Annotated[int, typer.Option(help="Tokens over which scores are averaged.", min=1)] = 256,
    dtype: inputs.DtypeOption = None,
    device: inputs.DeviceOption = None,
) -> Iterator[Found]:
    """Perplexity against position. Texts are decoded through each cache from the first token on, `dynamic` first.

    \b
    Examples:
        kvcache-plugins eval perplexity --text-file book.txt --cache transform --cache kivi-4bit --chunk 64
    """
    from kvcache_plugins.eval import harness

    from .fidelity import measure_perplexity

    # One token comes before the first that is scored
    loaded, cut = harness.load_with_windows(model, text_file, (windows, length - 1, 1), dtype, device)
    yield from loaded_settings(loaded)
    factories = harness.cache_factories(cache, loaded)
    with track_progress(windows * len(factories)) as announce:
        yield from measure_perplexity(loaded, cut, factories, chunk=chunk, stretch=stretch, on_progress=announce)


@benchmark("retrieval", "{model} on {data_file}, questions: {num_questions}", with_dense=True)
def evaluate_retrieval(
    data_file: Annotated[Path, typer.Option(help="JSON lines of one of the two sets.")],
    cache: inputs.CachesOption,
    model: inputs.ModelOption = "smollm2",
    questions: Annotated[int | None, typer.Option(help="The first so many; all by default.", min=1)] = None,
    records: Annotated[int | None, typer.Option(help="Lines or pairs of each context; all by default.", min=1)] = None,
    batch_size: Annotated[int, typer.Option(help="Questions decoded together.", min=1)] = 1,
    dtype: inputs.DtypeOption = None,
    device: inputs.DeviceOption = None,
) -> Iterator[Found]:
    """Ask for one line, or one value, of a long context. Each cache is asked, `dynamic` first.

    \b
    Examples:
        kvcache-plugins eval retrieval --data-file 200_lines.jsonl --cache infinigen --cache h2o
    """
    from kvcache_plugins.eval import harness

    from .answers import answer_questions, read_questions

    asked = read_questions(data_file, records)[:questions]
    if not asked:
        raise ValueError(f"`questions`: there is none in {data_file}, or none was asked for")
    loaded, tokenizer = inputs.load_for_evaluation(model, dtype, device)
    factories = harness.cache_factories(cache, loaded)
    yield from loaded_settings(loaded)
    yield Settings(num_questions=len(asked))
    with track_progress(-(-len(asked) // batch_size) * len(factories)) as announce:
        yield from answer_questions(loaded, tokenizer, asked, factories, announce, batch_size)
