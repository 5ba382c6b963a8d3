"""`kvcache-plugins bench`: the benchmarks. Each declares its options where it measures, in `kvcache_plugins.eval`."""

from kvcache_plugins.console.lazy_group import LazyGroup, make_app


_HELP = """Benchmarks of attention, decode steps, memory and prefixes.

Each writes its numbers as JSON: to a file with --out, to standard output with --json (`gpu`: files in a folder).

\b
Examples:
    kvcache-plugins bench kernels
    kvcache-plugins bench step --cache dynamic --cache gear --text-file book.txt --json | jq .rows
"""


class BenchGroup(LazyGroup):
    """Commands of `kvcache-plugins bench`."""

    lazy_commands = {
        "step": "kvcache_plugins.eval.benchmarks.step:benchmark_steps",
        "kernels": "kvcache_plugins.eval.benchmarks.kernels:benchmark_kernels",
        "memory": "kvcache_plugins.eval.benchmarks.memory:benchmark_memory",
        "prompts": "kvcache_plugins.eval.benchmarks.prompts:benchmark_prompts",
        "prefix": "kvcache_plugins.eval.benchmarks.prompts:benchmark_prefix",
        "store": "kvcache_plugins.eval.benchmarks.store:benchmark_store",
        "infinigen": "kvcache_plugins.eval.benchmarks.infinigen:benchmark_infinigen",
        "llama-cpp": "kvcache_plugins.eval.benchmarks.llama_cpp:benchmark_llama_cpp",
        "machine-code": "kvcache_plugins.eval.benchmarks.machine_code:benchmark_machine_code",
        "gpu": "kvcache_plugins.eval.gpu.command:run_on_gpu",
        "runahead": "kvcache_plugins.eval.runahead.benchmark:benchmark_runahead",
        "runahead-simulation": "kvcache_plugins.eval.runahead.simulation:simulate",
        "lm-eval": "kvcache_plugins.eval.benchmarks.lm_eval:benchmark_lm_eval",
    }


app = make_app(BenchGroup, _HELP)
