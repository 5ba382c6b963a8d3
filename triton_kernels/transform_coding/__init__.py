"""Decode attention straight from transform-coded rows, and tokens coded as such rows.

`attend` launches `attend_kernel`, which goes through `tiles`: codes become `points`, two `halves` at a time, and keys
are met before their rotary embedding by `turned_queries`. `combine` of `attention` merges what comes of it. Tokens are
coded by `code_rows`, which does with a tile what is in `coding_tiles`.
"""
