"""Decode attention straight from transform-coded rows.

`attend` launches `attend_kernel`, which goes through `tiles`: codes become `points`, two `halves` at a time, and keys
are met before their rotary embedding by `turned_queries`. `combine` of `attention` merges what comes of it.
"""
