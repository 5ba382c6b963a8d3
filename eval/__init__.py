"""Measuring caches: their distance from a dense one, their bytes, their speed, and tables of the results.

`docs/layout.md` lists the files. Functions of `commands`, `benchmarks.commands` and `measures.commands` declare the
options and help of commands: `kvcache_plugins.cli` only names them.
"""
