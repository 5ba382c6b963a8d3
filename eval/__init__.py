"""Measuring caches: how near they stay to a dense one, what they hold, how fast they are, and the tables of it.

| room | has |
|---|---|
| `harness` | what every measurement needs: windows of text, caches by name, timing, checks |
| `benchmark` | a benchmark is a function that yields rows: `benchmark` makes its command, JSON and table |
| `measures/` | what is measured of a cache's answers: divergence, perplexity, retrieval, texts side by side |
| `benchmarks/` | what is timed or weighed: `kvcache-plugins bench` |
| `families` | caches tried on a tiny model of every decoder family: `kvcache-plugins models` |
| `sweep` | caches x models x measures, from a file: `kvcache-plugins eval sweep` |
| `tables`, `figures` | results as documents and figures: `kvcache-plugins eval report` |
| `tasks/` | tasks of lm-eval that need no network |
| `machine_code` | kernels compiled for a GPU that need not be there, and their instructions counted |
| `gpu` | the checks and timings for a machine with a GPU |
| `runahead/` | KV-Runahead's prefill over several processes |
| `results/` | JSON of what was measured |

`lm_eval_model` is lm-eval's model `kvcache`. A function that a command runs declares the command's
options and help: `kvcache_plugins.cli` only names it.
"""
