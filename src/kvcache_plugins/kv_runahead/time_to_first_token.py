"""The time to first token of a partition, simulated: compute and transfers in a pipeline over layers and ranks.

In every layer a rank projects the keys and values of its slice, waits for those of everything before it, sends both
on, and attends. A few array operations simulate that for many partitions at once.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from .cost import CostModel
from .measurements import Array, Link


def dot_products(lengths: Sequence[int]) -> tuple[int, ...]:
    """Dot products of queries and keys of each rank, as rectangles: its slice by all up to its end."""
    return tuple(length * end for length, end in zip(lengths, itertools.accumulate(lengths), strict=True))


def entries_transferred(lengths: Sequence[int]) -> int:
    """Keys and values (two a token) sent in a layer: each rank but the last sends all up to the end of its slice."""
    return 2 * sum(itertools.accumulate(lengths[:-1]))


def predict_ttft(
    lengths: Sequence[int], cost: CostModel, link: Link, bytes_per_token: float, num_layers: int
) -> float:
    """
    Simulated seconds until the last of a chain of ranks has the last token's hidden state.

    Args:
        lengths (`Sequence[int]`): tokens of each rank's slice, first rank first.
        cost (`CostModel`): compute of a slice through all layers, of which every layer takes the same part.
        link (`Link`): from each rank to the next; a rank sends one message at a time, and computes meanwhile.
        bytes_per_token (`float`): bytes of the keys and values of one token in one layer, see `bytes_of_token`.
        num_layers (`int`): layers of the model.
    """
    return float(predict_ttfts(np.array([lengths], dtype=np.float64), cost, link, bytes_per_token, num_layers)[0])


def predict_ttfts(lengths: Array, cost: CostModel, link: Link, bytes_per_token: float, num_layers: int) -> Array:
    """`predict_ttft` of many partitions at once: `[num_partitions, num_ranks]` to `[num_partitions]`."""
    num_partitions, num_ranks = lengths.shape
    ends = lengths.cumsum(axis=1)
    projecting = cost.projection_seconds(lengths) / num_layers
    attending = cost.seconds(lengths, ends - lengths) / num_layers - projecting
    sending = link.seconds(ends * bytes_per_token)
    # When a rank has done a layer, when its link is free again, and when its prefix is there
    done, sent, arrived = (np.zeros((num_partitions, num_ranks)) for _ in range(3))
    # A wave: in step `s` rank `i` is in layer `s - i`, so everything that it waits for belongs to the step before
    for step in range(num_layers + num_ranks - 1):
        active = slice(max(0, step - num_layers + 1), min(num_ranks, step + 1))
        ready = np.maximum(done[:, active] + projecting[:, active], arrived[:, active])
        sent[:, active] = np.maximum(ready, sent[:, active]) + sending[:, active]
        done[:, active] = ready + attending[:, active]
        arrived[:, 1:] = sent[:, :-1]
    if link.shared:
        # A bound, as if the link were never idle: who sends when is not simulated
        return np.maximum(done[:, -1], num_layers * sending[:, :-1].sum(axis=1))
    return done[:, -1]


def predict_tsp_ttft(
    length: int, num_ranks: int, cost: CostModel, link: Link, bytes_per_token: float, num_layers: int
) -> float:
    """
    Simulated seconds of tensor/sequence-parallel prefill (TSP): even slices, an all-gather of keys and values in every
    layer, in which all ranks wait for the slowest. The arguments are those of `predict_ttft`.
    """
    share = length / num_ranks
    # Around a ring: each rank passes on the share of every other
    num_messages = (num_ranks - 1) * (num_ranks if link.shared else 1)
    gathering = num_messages * link.seconds(share * bytes_per_token)
    return cost.seconds(share, length - share) + num_layers * gathering
