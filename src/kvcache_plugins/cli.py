"""The console script `kvcache-plugins`: parses options and prints what `eval` and `registry` decide.

Results go to standard output; progress, timings and errors to standard error. A user's error is one line and exit code
2; Ctrl-C is exit code 130.
"""

import json
import sys
from importlib import metadata
from pathlib import Path
from textwrap import shorten
from typing import Annotated

import typer
from transformers import TextStreamer

from .eval import bench, evaluate, recommend
from .eval.command_line import load_for_evaluation, make_table, open_console, track_progress, user_errors
from .eval.comparison import Comparison, ComparisonRow, Generation, encode_prompt, generate_with, row_fields
from .eval.report import provenance
from .eval.runahead import plan
from .eval.windows import encode_text, spread_windows
from .infinigen.calibration import LayerReport
from .infinigen.calibration import calibrate as measure_layers
from .registry import CacheEntry, create_cache, describe_caches, list_caches, parse_option


DEMO_CACHES = ("dynamic", "gear-4bit", "gear-2bit", "gear-l-2bit", "kivi-2bit")

# Characters of the generated text in a table, and the width from which there is room for them
SHORT_TEXT = 20
TEXT_FROM_WIDTH = 100

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

ModelOption = Annotated[str, typer.Option(help="`smollm2`, `gemma3-270m`, a folder or a hub name.")]
PromptOption = Annotated[str | None, typer.Option(help="The prompt; comes after the text of --prompt-file.")]
PromptFileOption = Annotated[
    Path | None, typer.Option(help="A text file to read the prompt from; - is standard input.")
]
ChatOption = Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")]
DtypeOption = Annotated[str | None, typer.Option(help="float32 (default on CPU), bfloat16 (elsewhere) or float16.")]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda, ...; by default a GPU where there is one.")]
SeedOption = Annotated[int, typer.Option(help="Random seed.")]

app.add_typer(bench.app, name="bench")
app.add_typer(evaluate.app, name="eval")
app.command("plan")(plan.main)
app.command("recommend")(recommend.main)


def _print_version(wanted: bool) -> None:
    if wanted:
        open_console().print(f"kvcache-plugins {metadata.version('kvcache-plugins')}")
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def kvcache_plugins(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """KV caches for Hugging Face Transformers that hold less, move less and start sooner.

    \b
    Examples:
        kvcache-plugins list
        kvcache-plugins generate --cache gear-2bit --prompt "Once upon a time"
        kvcache-plugins compare --prompt-file LICENSE --max-new-tokens 32
        kvcache-plugins eval run --model kvcache --model_args pretrained=smollm2,cache=gear-2bit --tasks copa
        kvcache-plugins recommend --memory 100MB --context 8192
        kvcache-plugins bench kernels
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command("list")
def list_command(
    pattern: Annotated[str, typer.Argument(help="Shell pattern of names, such as 'gear*'.")] = "*",
) -> None:
    """List the caches that --cache takes, what each name stands for and whether what it needs is installed.

    \b
    Examples:
        kvcache-plugins list
        kvcache-plugins list 'gear*'
    """
    with user_errors():
        entries = describe_caches(pattern)
        if not entries:
            raise ValueError(f"No cache matches `{pattern}`. Known caches: {', '.join(list_caches())}")
    columns = {"cache": "name", "what it is": "name", "options": "name", "needs": "name"}
    open_console().print(make_table("", columns, [_entry_cells(entry) for entry in entries]))


def _entry_cells(entry: CacheEntry) -> tuple[str, ...]:
    options = " ".join(f"{name}={value}" for name, value in entry.options.items())
    needs = "-" if entry.requires is None else f"{entry.requires}: {'found' if entry.is_available else 'missing'}"
    return entry.name, entry.summary, options or "-", needs


@app.command()
def generate(
    model: ModelOption = "smollm2",
    cache: Annotated[str, typer.Option(help="A name of `kvcache-plugins list`.")] = "gear",
    cache_option: Annotated[
        list[str] | None,
        typer.Option(help="key=value for the cache (integer, float, true, false, none or text); repeatable."),
    ] = None,
    prompt: PromptOption = None,
    prompt_file: PromptFileOption = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 64,
    chat: ChatOption = False,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    seed: SeedOption = 42,
    temperature: Annotated[float | None, typer.Option(help="Sample at this temperature; greedy by default.")] = None,
) -> None:
    """Continue a prompt through a cache, streaming the text; bytes held and speed follow on standard error.

    \b
    Examples:
        kvcache-plugins generate --cache gear-2bit --prompt "The three laws of robotics are"
        kvcache-plugins generate --cache gear --cache-option nbits=2 --cache-option rank=8 --prompt-file notes.txt
        kvcache-plugins generate --chat --prompt "Why is the sky blue?" --max-new-tokens 200 --temperature 0.7
        cat paper.txt | kvcache-plugins generate --prompt-file - --prompt "In one sentence:"
    """
    with user_errors():
        options = dict(parse_option(option) for option in cache_option or [])
        text = _read_prompt(prompt, prompt_file)
        loaded, tokenizer = load_for_evaluation(model, dtype, device)
        token_ids = encode_prompt(tokenizer, text, chat)
        generation = generate_with(
            loaded,
            token_ids,
            create_cache(cache, loaded, **options),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        )
    open_console(stderr=True).print(_summary_line(cache, token_ids.numel(), generation), markup=False, soft_wrap=True)


def _summary_line(cache: str, num_prompt_tokens: int, generation: Generation) -> str:
    memory = generation.memory
    return (
        f"{cache}: {memory.total_bytes:,} bytes held (compression {memory.compression_ratio:.2f}x, "
        f"{memory.kv_percent:.1f} % of a 16-bit cache); prompt of {num_prompt_tokens} tokens in "
        f"{generation.prefill_seconds:.2f} s, {len(generation.token_ids)} new ones at "
        f"{_number(generation.tokens_per_second, 1)} tokens/s"
    )


@app.command()
def compare(
    cache: Annotated[
        list[str] | None,
        typer.Option(help="NAME or NAME:key=value,key=value; repeatable. `dynamic` always comes first."),
    ] = None,
    model: ModelOption = "smollm2",
    prompt: PromptOption = None,
    prompt_file: PromptFileOption = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 64,
    chat: ChatOption = False,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    seed: SeedOption = 42,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Run several caches on one prompt, side by side: text, KL to the dense cache, bytes held and speed.

    KL is the mean over the dense cache's own continuation, fed through each cache after the prompt, and "top-1" the
    share of it at which both find the same token most likely. "differs at" is the first generated token that is not
    the dense cache's. KV % is of a cache at 16 bits, the ratio is to the
    model's dtype. Exit code 1 if a cache failed on the way: its row says how.

    \b
    Examples:
        kvcache-plugins compare --prompt-file LICENSE --prompt "In short, this licence"
        kvcache-plugins compare --cache gear-2bit --cache gear-2bit:rank=8 --cache fp8 --prompt-file book.txt
        kvcache-plugins compare --prompt-file book.txt --json > comparison.json
    """
    with user_errors():
        text = _read_prompt(prompt, prompt_file)
        loaded, tokenizer = load_for_evaluation(model, dtype, device)
        token_ids = encode_prompt(tokenizer, text, chat)
        caches = cache or DEMO_CACHES
        comparison = Comparison(loaded, tokenizer, token_ids, caches, max_new_tokens=max_new_tokens, seed=seed)
        with track_progress(comparison.num_steps) as announce:
            rows = comparison.run(announce)
    loaded_dtype = str(loaded.dtype).removeprefix("torch.")
    if as_json:
        settings = {"model": model, "dtype": loaded_dtype, "chat": chat, "seed": seed}
        settings.update(num_prompt_tokens=token_ids.numel(), max_new_tokens=max_new_tokens)
        content = {**provenance(loaded.device), "settings": settings, "rows": [row_fields(row) for row in rows]}
        typer.echo(json.dumps(content, indent=2))
    else:
        title = f"{model}, {loaded_dtype}, prompt of {token_ids.numel()} tokens, {max_new_tokens} new ones at most"
        _print_rows(title, rows)
    if any(row.error for row in rows):
        raise typer.Exit(1)


@app.command()
def calibrate(
    text_file: Annotated[Path, typer.Option(help="Text that is like what the model will read.")],
    out: Annotated[Path, typer.Option(help="safetensors file to write.")],
    model: ModelOption = "smollm2",
    windows: Annotated[int, typer.Option(help="Windows of the text; every other one is only measured.")] = 8,
    length: Annotated[int, typer.Option(help="Tokens a window.")] = 1024,
    rank: Annotated[int, typer.Option(help="Rank of the corrections; 0 for none.")] = 128,
    min_recall: Annotated[float, typer.Option(help="A layer of which less is captured stays whole.")] = 0.9,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
) -> None:
    """Measure how well InfiniGen speculates each layer of a model, and fit corrections.

    The figures are the attention mass that a tenth of the tokens captures, chosen by the true queries (oracle), by the
    paper's guess (input), by ours (stream), and by ours with the correction. The cache takes the file as
    `InfiniGenCache(model, calibration="FILE")`.

    \b
    Examples:
        kvcache-plugins calibrate --model smollm2 --text-file book.txt --out smollm2.safetensors
        kvcache-plugins compare --cache infinigen:calibration=smollm2.safetensors --prompt-file book.txt
    """
    with user_errors():
        text = text_file.read_text(encoding="utf-8")
        loaded, tokenizer = load_for_evaluation(model, dtype, device)
        token_ids, start_ids = encode_text(tokenizer, text)
        cut = spread_windows(token_ids, windows, length // 2, length - length // 2 - 1, start_ids)
        with track_progress(len(cut)) as announce:
            calibration = measure_layers(loaded, cut, rank=rank, min_recall=min_recall, on_progress=announce)
        calibration.save(out)
    columns = {"layer": "number", "oracle": "number", "input": "number", "stream": "number", "corrected": "number"}
    columns |= {"choice": "name", "recall": "number"}
    rows = [_calibration_cells(report) for report in calibration.reports]
    open_console().print(make_table(f"{model}: {out}", columns, rows))


def _calibration_cells(report: LayerReport) -> tuple[str, ...]:
    masses = (report.oracle, report.by_input, report.by_stream, report.corrected)
    return str(report.layer_idx), *(f"{mass:.4f}" for mass in masses), report.choice, f"{report.recall:.4f}"


def _read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if prompt_file is None:
        if prompt is None:
            raise ValueError("Give a prompt with `--prompt`, `--prompt-file` or both")
        return prompt
    text = sys.stdin.read() if str(prompt_file) == "-" else prompt_file.read_text(encoding="utf-8")
    return text if prompt is None else f"{text.rstrip()}\n\n{prompt}"


def _print_rows(title: str, rows: list[ComparisonRow]) -> None:
    console = open_console()
    columns = {
        "cache": "name",
        "differs at": "number",
        "KL": "number",
        "top-1": "number",
        "MB": "number",
        "KV %": "number",
        "ratio": "number",
        "prefill s": "number",
        "tokens/s": "number",
    }
    # A narrow terminal keeps the numbers: the texts stand below in any case
    if console.width >= TEXT_FROM_WIDTH:
        columns["text"] = "text"
    console.print(make_table(title, columns, [_number_cells(row)[: len(columns)] for row in rows]))
    reports = {row.cache: row.generation.memory.parts for row in rows if row.generation is not None}
    parts = list(dict.fromkeys(part for report in reports.values() for part, size in report.items() if size))
    cells = [(cache, *(_kilobytes(report.get(part, 0)) for part in parts)) for cache, report in reports.items()]
    console.print(make_table("kB held, by part", {"cache": "name", **dict.fromkeys(parts, "number")}, cells))
    for row in rows:
        console.print(f"{row.cache}:", style="bold", markup=False)
        console.print(f"failed with {row.error}" if row.error else row.text, markup=False, soft_wrap=True)
        console.print()


def _number_cells(row: ComparisonRow) -> tuple[str, ...]:
    if row.generation is None:
        return row.cache, *["-"] * 8, shorten(f"failed: {row.error}", SHORT_TEXT, placeholder="...")
    generation = row.generation
    memory = generation.memory
    return (
        row.cache,
        "-" if row.first_difference is None else str(row.first_difference),
        _number(row.kl, 4),
        _number(row.top1_agreement, 3),
        f"{memory.total_bytes / 1e6:.2f}",
        f"{memory.kv_percent:.1f}",
        f"{memory.compression_ratio:.2f}",
        f"{generation.prefill_seconds:.2f}",
        _number(generation.tokens_per_second, 1),
        shorten(row.text, SHORT_TEXT, placeholder="..."),
    )


def _kilobytes(size: int) -> str:
    return f"{size / 1e3:,.1f}" if size else "-"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    app()
