"""Measuring caches: how near they stay to a dense one, what they hold, how fast they are, and the tables of it.

`docs/layout.md` says what is where. A function that a command runs declares the command's options and help:
`kvcache_plugins.cli` only names it.
"""
