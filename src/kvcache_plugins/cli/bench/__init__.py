"""`kvcache-plugins bench`: the benchmarks, each with its options in a module here and its measuring in `eval`."""

from kvcache_plugins.console.lazy_group import LazyCommand, LazyGroup, make_app


_HELP = """Benchmarks of attention, decode steps, memory and prefixes.

Each writes its numbers as JSON: to a file with --out, to standard output with --json (`gpu`: files in a folder).

\b
Examples:
    kvcache-plugins bench kernels
    kvcache-plugins bench step --cache dynamic --cache gear --text-file book.txt --json | jq .rows
"""


class BenchGroup(LazyGroup):
    """What `kvcache-plugins bench` is followed by."""

    lazy_commands = {
        "kernels": LazyCommand("kvcache_plugins.cli.bench.kernels:main", "Time decode attention alone."),
        "step": LazyCommand("kvcache_plugins.cli.bench.step:main", "Time whole decode steps of a model."),
        "shapes": LazyCommand(
            "kvcache_plugins.cli.bench.shapes:main",
            "Time steps and attention over shapes.",
        ),
        "llama-cpp": LazyCommand(
            "kvcache_plugins.cli.bench.llama_cpp:main", "Time steps and attention beside llama.cpp."
        ),
        "decode": LazyCommand("kvcache_plugins.cli.bench.decode:main", "Time every step of a long decode."),
        "memory": LazyCommand("kvcache_plugins.cli.bench.memory:main", "Measure the memory of decoding."),
        "prefix": LazyCommand(
            "kvcache_plugins.cli.bench.prefix:main", "Compare ways to continue one prefix many times."
        ),
        "prompts": LazyCommand(
            "kvcache_plugins.cli.bench.prompts:main", "Time prompts, chunks of them, and tokens behind them."
        ),
        "store": LazyCommand(
            "kvcache_plugins.cli.bench.store:main", "Time the first token of prompts that were read before."
        ),
        "pool": LazyCommand(
            "kvcache_plugins.cli.bench.pool:main", "Time decode steps with a pool in memory and on disk."
        ),
        "compile": LazyCommand(
            "kvcache_plugins.cli.bench.compile:main", "Time decode steps of a model as it is and compiled."
        ),
        "infinigen": LazyCommand(
            "kvcache_plugins.cli.bench.infinigen:main", "Time decode steps, and the parts of those of InfiniGen."
        ),
        "predict": LazyCommand("kvcache_plugins.cli.bench.predict:main", "Predict attention times from bytes."),
        "machine-code": LazyCommand(
            "kvcache_plugins.cli.bench.machine_code:main", "Count the machine code of decode attention and of coding."
        ),
        "gpu": LazyCommand("kvcache_plugins.cli.bench.gpu:main", "Check and time all that wants a GPU."),
        "runahead": LazyCommand(
            "kvcache_plugins.cli.bench.runahead:main", "Time to first token of KV-Runahead, TSP and one rank."
        ),
        "runahead-simulation": LazyCommand(
            "kvcache_plugins.cli.bench.runahead_simulation:main", "Simulate the time to first token on many ranks."
        ),
        "lm-eval": LazyCommand("kvcache_plugins.cli.bench.lm_eval:main", "lm-eval's own model beside `kvcache`."),
    }


app = make_app(BenchGroup, _HELP)
