"""How `kvcache-plugins recommend` shows what `advice.recommendation` finds."""

from kvcache_plugins.advice.byte_sizes import show_bytes
from kvcache_plugins.advice.recommendation import MAX_BATCH_SIZE, MAX_CONTEXT, MEASURED_KL, CacheFit, Recommendation

from .tables import make_table, open_console


def print_recommendation(found: Recommendation, in_thousands: bool) -> None:
    """
    Prints a recommendation.

    Args:
        found (`Recommendation`): what is printed.
        in_thousands (`bool`): whether sizes are in MB and GB, not in MiB and GiB.
    """
    console = open_console()
    columns = {
        "cache": "name",
        "fits": "name",
        "KL": "number",
        f"on {found.device}": "number",
        "in host memory": "number",
    }
    columns |= {"% of 16 bits": "number", "largest context": "number", "largest batch": "number"}
    rows = [_cells(fit, fit.cache == found.recommended, in_thousands) for fit in found.caches]
    console.print(make_table(_title(found, in_thousands), columns, rows))
    console.print("By KL to the dense cache, of SmolLM2 on WikiText-2 behind 1024 tokens; -: measured otherwise.")
    console.print(found.reason, markup=False, soft_wrap=True)
    if found.max_context is not None and found.context > found.max_context:
        console.print(
            f"The model was made for {found.max_context:,} tokens: fewer than were asked for.",
            markup=False,
            soft_wrap=True,
        )
    for reason in dict.fromkeys(found.not_sized.values()):
        names = ", ".join(name for name, why in found.not_sized.items() if why == reason)
        console.print(f"Left out: {names}: {reason}", markup=False, soft_wrap=True)


def _title(found: Recommendation, in_thousands: bool) -> str:
    new = f", {found.new_tokens:,} of them decoded" if found.new_tokens else ""
    budget = show_bytes(found.available_bytes, in_thousands)
    if found.available_bytes != found.memory_bytes:
        budget += f" beside weights of {show_bytes(found.weights_bytes or 0, in_thousands)}"
    return (
        f"{found.model}, {found.dtype} on {found.device}: {found.batch_size:,} x {found.context:,} tokens{new}, "
        f"in {budget}"
    )


def _cells(fit: CacheFit, is_recommended: bool, in_thousands: bool) -> tuple[str, ...]:
    return (
        fit.cache,
        "recommended" if is_recommended else "yes" if fit.fits else "no",
        "-" if (kl := MEASURED_KL.get(fit.cache)) is None else f"{kl:.4f}",
        show_bytes(fit.device_bytes, in_thousands),
        show_bytes(fit.host_bytes, in_thousands) if fit.host_bytes else "-",
        f"{fit.memory.kv_percent:.1f}",
        _limited(fit.largest_context, MAX_CONTEXT),
        _limited(fit.largest_batch_size, MAX_BATCH_SIZE),
    )


def _limited(number: int | None, limit: int) -> str:
    return f"over {limit:,}" if number is None else f"{number:,}"
