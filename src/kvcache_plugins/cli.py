"""The console script `kvcache-plugins`: parses options and prints what `eval` and `registry` decide.

Results go to standard output, with `--json` as JSON; progress, timings and errors to standard error. What exit codes
mean stands in `eval.command_group`.
"""

from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import Cache, PreTrainedModel, TextStreamer

from kvcache_plugins.console.prompts import encode_prompt, read_prompt

from .advice.choose_by_kl import choose_cache
from .advice.doctor import examine
from .console import recommend
from .console.command_group import FAILED, CommandGroup
from .console.command_line import load_for_evaluation, make_table, open_console, track_progress, user_errors
from .console.doctor_tables import print_report
from .console.json_output import JsonOption, free_stdout, prepare_file, print_json
from .console.run_report import provenance
from .eval import bench, evaluate
from .eval.harness.windows import encode_text, spread_windows
from .eval.measures.comparison import Comparison, generate_with, generation_fields, row_fields
from .eval.measures.comparison_tables import choice_line, print_rows, summary_line
from .eval.runahead import plan
from .infinigen.calibration import LayerReport
from .infinigen.calibration import calibrate as measure_layers
from .registry import CacheEntry, create_cache, describe_caches, list_caches, parse_option


DEMO_CACHES = ("dynamic", "gear-4bit", "gear-2bit", "gear-l-2bit", "kivi-2bit")

app = typer.Typer(cls=CommandGroup, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

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


@app.callback()
def kvcache_plugins(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """KV caches for Hugging Face Transformers that hold less, move less and start sooner.

    Results go to standard output, with --json as one JSON document and nothing else; progress and errors go to
    standard error.

    \b
    Exit codes:
        0    done
        1    done, but something failed: a cache of compare, a run of eval sweep, a check of doctor
        2    your error: one line says which
        130  interrupted
        141  whoever read the output has gone, as after `| head`

    \b
    Examples:
        kvcache-plugins doctor
        kvcache-plugins list
        kvcache-plugins generate --cache gear-2bit --prompt "Once upon a time"
        kvcache-plugins compare --prompt-file LICENSE --max-new-tokens 32
        kvcache-plugins eval run --model kvcache --model_args pretrained=smollm2,cache=gear-2bit --tasks copa
        kvcache-plugins recommend --memory 100MB --context 8192
        kvcache-plugins bench kernels
    """


@app.command("list")
def list_command(
    pattern: Annotated[str, typer.Argument(help="Shell pattern of names, such as 'gear*'.")] = "*",
    as_json: JsonOption = False,
) -> None:
    """List the caches that --cache takes, what each name stands for and whether what it needs is installed.

    \b
    Examples:
        kvcache-plugins list
        kvcache-plugins list 'gear*'
        kvcache-plugins list --json | jq -r '.caches[] | select(.is_available) | .name'
    """
    with user_errors():
        entries = describe_caches(pattern)
        if not entries:
            raise ValueError(f"No cache matches `{pattern}`. Known caches: {', '.join(list_caches())}")
    if as_json:
        print_json({"caches": [_entry_fields(entry) for entry in entries]})
        return
    columns = {"cache": "name", "what it is": "name", "options": "name", "needs": "name"}
    open_console().print(make_table("", columns, [_entry_cells(entry) for entry in entries]))


def _entry_fields(entry: CacheEntry) -> dict[str, object]:
    fields = {name: getattr(entry, name) for name in ("name", "summary", "requires", "is_available")}
    return {**fields, "options": dict(entry.options)}


def _entry_cells(entry: CacheEntry) -> tuple[str, ...]:
    options = " ".join(f"{name}={value}" for name, value in entry.options.items())
    needs = "-" if entry.requires is None else f"{entry.requires}: {'found' if entry.is_available else 'missing'}"
    return entry.name, entry.summary, options or "-", needs


@app.command()
def doctor(
    check: Annotated[
        bool, typer.Option("--check", help="Also run attention on every device; compiling may take minutes.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show versions, devices, kernels and models, and what to do about what is missing.

    Exit code 1 if the package cannot work here: something that it requires is missing, broken or of a version that is
    not supported, or a kernel that would be chosen does not run. What is optional and missing is only said.

    \b
    Examples:
        kvcache-plugins doctor
        kvcache-plugins doctor --check
        kvcache-plugins doctor --json | jq .findings
    """
    report = examine(check)
    if as_json:
        print_json(report)
    else:
        print_report(report)
    if not report["works"]:
        raise typer.Exit(FAILED)


@app.command()
def generate(
    model: ModelOption = "smollm2",
    cache: Annotated[str | None, typer.Option(help="A name of `kvcache-plugins list`; `gear` by default.")] = None,
    cache_option: Annotated[
        list[str] | None,
        typer.Option(help="key=value for the cache (integer, float, true, false, none or text); repeatable."),
    ] = None,
    max_kl: Annotated[
        float | None,
        typer.Option(help="Instead of --cache: the cheapest GEAR preset with at most this KL on the prompt's end."),
    ] = None,
    prompt: PromptOption = None,
    prompt_file: PromptFileOption = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 64,
    chat: ChatOption = False,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    seed: SeedOption = 42,
    temperature: Annotated[float | None, typer.Option(help="Sample at this temperature; greedy by default.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a prompt through a cache, streaming the text; bytes held and speed follow on standard error.

    With --max-kl the prompt's last tokens tell how far each preset strays from a dense cache on this very text, and
    the choice is printed on standard error; the prompt has to have about a hundred tokens for it. With --json the text
    is streamed to standard error.

    \b
    Examples:
        kvcache-plugins generate --cache gear-2bit --prompt "The three laws of robotics are"
        kvcache-plugins generate --cache gear --cache-option nbits=2 --cache-option rank=8 --prompt-file notes.txt
        kvcache-plugins generate --chat --prompt "Why is the sky blue?" --max-new-tokens 200 --temperature 0.7
        cat paper.txt | kvcache-plugins generate --prompt-file - --prompt "In one sentence:"
        kvcache-plugins generate --max-kl 0.02 --prompt-file LICENSE --prompt "In short, this licence"
    """
    with user_errors():
        if max_kl is not None and (cache is not None or cache_option):
            raise ValueError("`max_kl` chooses the cache: give it, or `cache` and `cache_option`, but not both")
        options = dict(parse_option(option) for option in cache_option or [])
        text = read_prompt(prompt, prompt_file)
        loaded, tokenizer = load_for_evaluation(model, dtype, device)
        token_ids = encode_prompt(tokenizer, text, chat)
        cache = cache or "gear"
        if max_kl is None:
            made = create_cache(cache, loaded, **options)
        else:
            cache, made = _choose_within(max_kl, loaded, token_ids)
        with free_stdout(as_json):
            generation = generate_with(
                loaded,
                token_ids,
                made,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                seed=seed,
                streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            )
    summary = summary_line(cache, token_ids.numel(), generation)
    open_console(stderr=True).print(summary, markup=False, soft_wrap=True)
    if as_json:
        settings = {"model": model, "cache": cache, "options": options, "max_kl": max_kl, "chat": chat, "seed": seed}
        settings |= {"dtype": str(loaded.dtype).removeprefix("torch."), "temperature": temperature}
        settings.update(num_prompt_tokens=token_ids.numel(), max_new_tokens=max_new_tokens)
        written = str(tokenizer.decode(list(generation.token_ids), skip_special_tokens=True))
        found = {"text": written, **generation_fields(generation)}
        print_json({**provenance(loaded.device), "settings": settings, **found})


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
    as_json: JsonOption = False,
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
        text = read_prompt(prompt, prompt_file)
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
        print_json(content)
    else:
        title = f"{model}, {loaded_dtype}, prompt of {token_ids.numel()} tokens, {max_new_tokens} new ones at most"
        print_rows(title, rows)
    if any(row.error for row in rows):
        raise typer.Exit(FAILED)


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
    as_json: JsonOption = False,
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
        prepare_file(out)
        loaded, tokenizer = load_for_evaluation(model, dtype, device)
        token_ids, start_ids = encode_text(tokenizer, text)
        cut = spread_windows(token_ids, windows, length // 2, length - length // 2 - 1, start_ids)
        with track_progress(len(cut)) as announce:
            calibration = measure_layers(loaded, cut, rank=rank, min_recall=min_recall, on_progress=announce)
        calibration.save(out)
    if as_json:
        settings = {"model": model, "text_file": text_file.name, "windows": windows, "length": length, "rank": rank}
        settings |= {"min_recall": min_recall, "dtype": str(loaded.dtype).removeprefix("torch.")}
        layers = [asdict(report) for report in calibration.reports]
        print_json({**provenance(loaded.device), "settings": settings, "file": str(out), "layers": layers})
        return
    columns = {"layer": "number", "oracle": "number", "input": "number", "stream": "number", "corrected": "number"}
    columns |= {"choice": "name", "recall": "number"}
    rows = [_calibration_cells(report) for report in calibration.reports]
    open_console().print(make_table(f"{model}: {out}", columns, rows))


def _calibration_cells(report: LayerReport) -> tuple[str, ...]:
    masses = (report.oracle, report.by_input, report.by_stream, report.corrected)
    return str(report.layer_idx), *(f"{mass:.4f}" for mass in masses), report.choice, f"{report.recall:.4f}"


def _choose_within(max_kl: float, model: PreTrainedModel, token_ids: torch.Tensor) -> tuple[str, Cache]:
    """The preset that the guard chooses, which is printed, and its cache."""
    cache = choose_cache(model, token_ids[None], max_kl=max_kl)
    assert cache.choice is not None
    open_console(stderr=True).print(choice_line(cache.choice), markup=False, soft_wrap=True)
    return cache.choice.preset, cache


if __name__ == "__main__":
    app()
