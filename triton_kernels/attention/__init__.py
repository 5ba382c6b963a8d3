"""Decode attention over compressed keys and values: dense keys and values are never written to memory.

`attend` launches the kernel that goes through compressed chunks, `combine` the one that merges what comes of it and
attends to what is stored exactly (`dense_part`). Their steps are in files of their own: `tiles` is what the first does
with a tile, made of `codes`, `low_rank` and `outliers`; `partials` is what it hands to the second; `softmax` and
`masks` are of both.
"""
