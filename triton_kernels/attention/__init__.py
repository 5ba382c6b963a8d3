"""Decode attention over compressed keys and values: dense keys and values are never written to memory.

`attend` launches the kernel that goes through compressed chunks, tile by tile: `keys` scores a tile, `values` sums its
values, and both add `low_rank` and `outliers`. `layout` tells them where `codes` are. `partials` are its results for
`combine`, which merges them and attends to exact tokens (`dense_part`); `finish` comes between for values that are
coded in a basis, rotated or less a mean.
"""
