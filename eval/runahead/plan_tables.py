"""How `kvcache-plugins plan` shows what it has planned."""

from kvcache_plugins.console.display import make_table, open_console
from kvcache_plugins.kv_runahead.planner import PartitionTable

from .measure import ModelFacts


def show_plan(table: PartitionTable, error: float, facts: ModelFacts) -> None:
    """Prints a table of partitions, and what it is founded on."""
    cost, link, console = table.cost, table.link, open_console()
    assert cost is not None
    cells = [
        [
            str(entry.length),
            " + ".join(str(round(ratio * entry.length)) for ratio in entry.ratios),
            " ".join(f"{ratio:.3f}" for ratio in entry.ratios),
            f"{entry.seconds:.3f}",
            "searched" if entry.measured else "planned",
            f"{cost.seconds(float(entry.length), 0.0):.3f}",
        ]
        for entry in table.entries
    ]
    columns = {"tokens": "number", "slices": "name", "shares": "name", "seconds": "number", "by": "name"}
    title = f"{table.world_size} ranks: seconds to the first token"
    console.print(make_table(title, {**columns, "one rank, predicted": "number"}, cells))
    console.print(
        f"a token {1e6 * cost.per_token:.1f} us, a query and key {1e9 * cost.per_pair:.2f} ns, fixed "
        f"{1e3 * cost.fixed:.1f} ms, share of a slice's own square {cost.triangle:.2f}; "
        f"off by {100 * error:.1f} % at most in what was timed",
        markup=False,
        soft_wrap=True,
    )
    if link is not None:
        console.print(
            f"link: {link.bytes_per_second / 1e9:.3f} GB/s, {1e6 * link.latency:.0f} us a message; "
            f"{facts.bytes_per_token} bytes a token and layer",
            markup=False,
            soft_wrap=True,
        )
