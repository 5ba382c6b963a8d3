"""Decode attention straight from transform-coded rows, and encoding of tokens as such rows.

`attend` launches `attend_kernel`, which goes through `tiles`: codes become `levels`, two halves at a time, and
`rotated_queries` meet keys before their rotary embedding. `combine` of `attention` merges partial results. `step` does
all that in one launch. `code_rows` encodes tokens by the steps of `coding_tiles`, and `push` adds a decoded token to a
layer. `decode_rows` makes states of rows that InfiniGen has chosen.
"""
