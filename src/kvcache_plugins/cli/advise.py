"""`kvcache-plugins list`, `doctor` and `recommend`: registered caches, the state of this machine, and advice."""

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from kvcache_plugins.advice.byte_sizes import in_thousands, show_bytes
from kvcache_plugins.console.commands import FAILED
from kvcache_plugins.console.display import make_table, measure_table, open_console, print_line, track_progress
from kvcache_plugins.console.inputs import JsonOption, ModelOption, default_device
from kvcache_plugins.console.results import print_json
from kvcache_plugins.registry import SEE_ALL_CACHES, CacheEntry, check_caches, describe_caches


if TYPE_CHECKING:
    from kvcache_plugins.advice.doctor import HealthReport
    from kvcache_plugins.advice.recommendation import Recommendation

_ENGINES = {"compiled": "compiled kernels", "triton": "Triton kernels", "torch": "plain PyTorch, which is slower"}
# Tokens for which `list` shows sizes and KL
_LISTED_TOKENS = 1024
# Width of a console that has room for a column of options
_WIDE = 110


def list_registered(
    pattern: Annotated[str, typer.Argument(help="Shell pattern of names, such as 'gear*'.")] = "*",
    as_json: JsonOption = False,
) -> None:
    """List the caches that --cache takes.

    A row has the name's meaning, its requirement and whether it is installed, the cache's bytes in percent of 16 bits,
    on a GPU and in host memory beside one, and the measured KL to the dense cache. Options are shown if there is room
    (110 columns), and in JSON.

    JSON: caches, a list of name, summary, requires (or null), is_available, options, kv_percent and host_percent (null
    where a cache cannot be sized here) and kl (or null).

    \b
    Examples:
        kvcache-plugins list
        kvcache-plugins list 'transform*'
        kvcache-plugins list --json | jq -r '.caches[] | select(.is_available) | .name'
    """
    entries = describe_caches(pattern)
    if not entries:
        raise ValueError(f"No cache matches `{pattern}`. {SEE_ALL_CACHES}")
    from kvcache_plugins.advice.recommendation import MEASURED_KL

    sizes = _measure_sizes(entries)
    if as_json:
        names = ("name", "summary", "requires", "is_available", "options")
        listed = []
        for entry in entries:
            described = {name: getattr(entry, name) for name in names}
            listed.append({**described, **sizes[entry.name], "kl": MEASURED_KL.get(entry.name)})
        print_json({"caches": listed})
        return
    console = open_console()
    columns = {"cache": "word", "KV %": "number", "KL": "number", "what it is": "name"}
    if console.width >= _WIDE:
        columns["options"] = "name"
    rows = []
    for entry in entries:
        state = "found" if entry.is_available else "missing"
        summary = entry.summary + (f" ({entry.requires}: {state})" if entry.requires is not None else "")
        options = " ".join(f"{name}={value}" for name, value in entry.options.items()) or "-"
        kl = MEASURED_KL.get(entry.name)
        numbers = _show_size(**sizes[entry.name]), "-" if kl is None else f"{kl:.4f}"
        rows.append((entry.name, *numbers, summary, options)[: len(columns)])
    console.print(make_table("", columns, rows))
    print_line(
        f"KV %: of 16 bits at {_LISTED_TOKENS} tokens, SmolLM2's shape, with `+` what is in host memory beside a GPU. "
        f"KL: to the dense cache, SmolLM2, a text scored in one forward after {_LISTED_TOKENS} tokens (infinigen: "
        "a novel, decoded); decoded one by one it is larger. -: not known."
    )


def _measure_sizes(entries: Sequence[CacheEntry]) -> dict[str, dict[str, float | None]]:
    """Predict the bytes of caches, in percent of 16 bits, for a model of SmolLM2's shape."""
    from transformers import LlamaConfig

    from kvcache_plugins.advice.memory_prediction import CacheSizer, CacheSizingError

    config = LlamaConfig(
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        hidden_size=576,
        # These two have no part in a cache
        vocab_size=8,
        intermediate_size=8,
    )
    sizer = CacheSizer(config)
    sizes: dict[str, dict[str, float | None]] = {}
    for entry in entries:
        sizes[entry.name] = {"kv_percent": None, "host_percent": None}
        # No size for a cache that needs a missing package, or that reads data
        with suppress(CacheSizingError, ImportError):
            report = sizer.measure(entry.name, _LISTED_TOKENS)
            percent = {place: report.kv_percent * size / report.total_bytes for place, size in report.devices.items()}
            sizes[entry.name] = {"kv_percent": percent["cuda"], "host_percent": percent.get("cpu", 0.0)}
    return sizes


def _show_size(kv_percent: float | None, host_percent: float | None) -> str:
    if kv_percent is None:
        return "-"
    return f"{kv_percent:.1f}" + (f" + {host_percent:.0f}" if host_percent else "")


def show_health(
    check: Annotated[bool, typer.Option("--check", help="Also run attention on devices; may take minutes.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show versions, devices, kernels and models, and what is missing.

    The last line sums up: what works, and which hints are about options alone. Exit code 1 if the package cannot work
    here: something that it requires is missing, broken or of a version that is not supported, or a kernel that would
    be chosen does not run.

    \b
    Examples:
        kvcache-plugins doctor
        kvcache-plugins doctor --check
        kvcache-plugins doctor --json | jq .findings
    """
    from kvcache_plugins.advice.doctor import examine

    report = examine(check)
    if as_json:
        print_json(report.to_dict())
    else:
        _print_health(report)
    if not report.works:
        raise typer.Exit(FAILED)


def _print_health(report: "HealthReport") -> None:
    console = open_console()
    columns = {"package": "word", "version": "name", "needed for": "name", "state": "name"}
    cells = [[each.name, each.version or "-", each.needed_for, each.detail or "ok"] for each in report.packages]
    console.print(make_table(f"kvcache-plugins {report.version}", columns, cells))
    console.print(make_table("This machine", {"what": "word", "found": "name"}, _machine_rows(report)))
    for finding in report.findings:
        print_line(f"{finding.severity}: {finding.what}")
        print_line(f"    {finding.advice}")
    print_line(_verdict(report), style="bold")


def _machine_rows(report: "HealthReport") -> list[tuple[str, str]]:
    gpus = [f"{gpu.name}, {gpu.memory_bytes / 2**30:.0f} GiB, capability {gpu.capability}" for gpu in report.gpus]
    threads = report.threads
    triton = report.triton
    settings = [f"{name}={value}" for name, value in report.settings.items() if value is not None]
    rows = [
        ("system", f"Python {report.python}, {report.platform}"),
        ("GPU", "; ".join(gpus) or "none that torch finds"),
        ("threads", f"{threads.torch} of torch, on {threads.usable_cores or threads.cores} cores"),
        ("Python, notebooks", "set OMP_WAIT_POLICY=PASSIVE before torch is imported, as these commands do"),
        ("environment", " ".join(settings) or "nothing set"),
        ("Triton", triton.status if triton.detail is None else f"{triton.status}: {triton.detail}"),
    ]
    for kernels in report.kernels:
        found = f"attention by {kernels.attention}, coding by {kernels.coding}"
        if kernels.check is not None:
            found += f"; agrees with plain PyTorch within {kernels.check:.0e}"
        rows.append((f"kernels on {kernels.device}", f"fails: {kernels.error}" if kernels.error else found))
    for model in report.models:
        state = "converted" if model.is_converted else "converted at first use"
        found = f"{model.package} {model.version}, {state}" if model.version else "from the hub"
        rows.append((f"model {model.name}", found))
    unusable = [cache for cache in report.caches if not cache.is_usable]
    num_usable = len(report.caches) - len(unusable)
    rows.append(("caches", f"{num_usable} of {len(report.caches)} can be used"))
    rows += [(f"cache {cache.name or '(unnamed)'}", f"cannot be used: {cache.reason}") for cache in unusable]
    return rows


def _verdict(report: "HealthReport") -> str:
    severities = [finding.severity for finding in report.findings]
    num_errors = severities.count("error")
    num_hints = severities.count("hint")
    num_usable = sum(cache.is_usable for cache in report.caches)
    works = f"{num_usable} of {len(report.caches)} caches"
    for kernels in report.kernels:
        if kernels.error is None and kernels.attention is not None:
            works += f", attention on {kernels.device} by {_ENGINES.get(kernels.attention, kernels.attention)}"
    if num_errors:
        return f"Does not work: {num_errors} error{'s' * (num_errors > 1)} above. What does: {works}."
    if not num_hints:
        return f"Works: {works}. Nothing is missing."
    one = num_hints == 1
    return f"Works: {works}. The {num_hints} hint{'s' * (not one)} above {'is' if one else 'are'} about options."


def recommend_caches(
    memory: Annotated[str, typer.Option(help="The budget on the device, such as 8GiB or 500MB.")],
    context: Annotated[int, typer.Option(help="Tokens that the cache holds, for each sequence.", min=1)],
    model: ModelOption = "smollm2",
    batch_size: Annotated[int, typer.Option(help="Sequences.", min=1)] = 1,
    new_tokens: Annotated[int, typer.Option(help="Tokens of the context that are decoded after a prompt.", min=0)] = 0,
    cache: Annotated[list[str] | None, typer.Option(help="NAME or NAME:key=value,key=value; repeatable.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 (default on cuda), float32 (on cpu) or float16.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; by default a GPU where there is one.")] = None,
    host_memory: Annotated[str | None, typer.Option(help="Host memory beside a GPU; unlimited by default.")] = None,
    with_weights: Annotated[bool, typer.Option("--with-weights", help="The budget is for weights too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the caches that fit a memory budget.

    Each row has the bytes of a cache, and the largest context and batch; by default for the main presets.
    Only the model's config is loaded. Bytes are those of `memory()` after such a run; activations are not counted, and
    weights only with --with-weights. The largest context and batch are those for which one more does not fit, while
    the other number stays. Caches are sorted by their measured KL to the dense one. Exit code 1 if nothing fits.

    JSON: model, context, batch_size, new_tokens, dtype, device, memory_bytes, host_memory_bytes (or null),
    weights_bytes (null if they are quantized), available_bytes (for the cache), max_context (that the model was made
    for, or null), recommended (a name or null), reason, not_sized (why, by name), and caches, a list of cache, fits,
    device_bytes, host_bytes, total_bytes, kl (or null), kv_percent (of 16 bits), parts (bytes by name),
    largest_context and largest_batch_size (null beyond 16777216 and 65536).

    \b
    Examples:
        kvcache-plugins recommend --model smollm2 --memory 100MB --context 8192
        kvcache-plugins recommend --model Qwen/Qwen2.5-7B --memory 24GiB --with-weights --context 131072
        kvcache-plugins recommend --model ./my-model --memory 8GiB --context 32768 --cache transform-16 --json
    """
    from kvcache_plugins.advice.recommendation import DEFAULT_CACHES, recommend

    specs = check_caches(cache) if cache else DEFAULT_CACHES
    with track_progress(len(specs)) as announce:
        found = recommend(
            model,
            memory,
            context,
            batch_size=batch_size,
            new_tokens=new_tokens,
            dtype=dtype,
            device=device or default_device(),
            host_memory=host_memory,
            with_weights=with_weights,
            caches=specs if cache else None,
            on_progress=announce,
        )
    if as_json:
        print_json(found.to_dict())
    else:
        _print_recommendation(found, in_thousands(memory))
    if found.recommended is None:
        raise typer.Exit(FAILED)


def _print_recommendation(found: "Recommendation", is_decimal: bool) -> None:
    from kvcache_plugins.advice.recommendation import MAX_BATCH_SIZE, MAX_CONTEXT

    new = f", {found.new_tokens:,} of them decoded" if found.new_tokens else ""
    budget = show_bytes(found.available_bytes, is_decimal)
    if found.available_bytes != found.memory_bytes:
        budget += f" beside weights of {show_bytes(found.weights_bytes or 0, is_decimal)}"
    tokens = f"{found.batch_size:,} x {found.context:,} tokens{new}"
    title = f"{found.model}, {found.dtype} on {found.device}: {tokens}, in {budget}"
    columns = {"cache": "word", "KL": "number", "fits": "word", f"on {found.device}": "number", "in host": "number"}
    columns |= {"KV %": "number", "max context": "number", "max batch": "number"}
    if not any(fit.host_bytes for fit in found.caches):
        del columns["in host"]
    rows = []
    for fit in found.caches:
        on_device = show_bytes(fit.device_bytes, is_decimal)
        fits = "take it" if fit.cache == found.recommended else "yes" if fit.fits else "no"
        row = [fit.cache, "-" if fit.kl is None else f"{fit.kl:.4f}", fits, on_device]
        if "in host" in columns:
            row.append(show_bytes(fit.host_bytes, is_decimal) if fit.host_bytes else "-")
        row.append(f"{fit.memory.kv_percent:.1f}")
        for number, limit in ((fit.largest_context, MAX_CONTEXT), (fit.largest_batch_size, MAX_BATCH_SIZE)):
            row.append(f">{limit:,}" if number is None else f"{number:,}")
        rows.append(row)
    console, table = open_console(), make_table(title, columns, rows)
    if measure_table(console, table) > console.width:
        # Bytes say it as well
        place = list(columns).index("KV %")
        del columns["KV %"]
        table = make_table(title, columns, [row[:place] + row[place + 1 :] for row in rows])
    console.width = max(console.width, measure_table(console, table))
    console.print(table)
    percent = " KV %: of 16 bits." if "KV %" in columns else ""
    print_line(f"Nearest to the dense cache first: KL as in `kvcache-plugins list`; -: not known.{percent}")
    print_line(found.reason)
    if found.max_context is not None and found.context > found.max_context:
        print_line(f"The model was made for {found.max_context:,} tokens: fewer than were asked for.")
    elif found.max_context is not None and any(
        fit.largest_context is None or fit.largest_context > found.max_context for fit in found.caches
    ):
        print_line(f"Max context is what fits the memory: the model was made for {found.max_context:,} tokens.")
    for reason in dict.fromkeys(found.not_sized.values()):
        names = ", ".join(name for name, why in found.not_sized.items() if why == reason)
        print_line(f"Left out: {names}: {reason}")
