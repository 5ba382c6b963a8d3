"""Simulation of the chain of ranks over a link, and slices planned by its time to the first token."""

import math
from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from kvcache_plugins.kv_runahead.planner import Array, CostModel, Link, Partition, planned

from .grid_search import search_partition


# Share of the time that one more rank has to save
_WORTH_A_RANK = 0.01
# Divisor of the prompt's length: the last step of a search
_FINEST = 4096


def predict_ttft(lengths: ArrayLike, cost: CostModel, link: Link, bytes_per_token: float, num_layers: int) -> Array:
    """
    Simulate the seconds `[...]` until the last rank has the last token's hidden state, for slices `[..., num_ranks]`.

    In every layer a rank projects its slice, waits for the states of all tokens before it, sends both on, one message
    at a time, and attends meanwhile. `bytes_per_token` are those of one layer, see `bytes_of_token`.
    """
    lengths = np.asarray(lengths, dtype=np.float64)
    num_ranks = lengths.shape[-1]
    ends = lengths.cumsum(axis=-1)
    # Keys and values of a slice do not depend on the prefix
    projecting = cost.projection_share * (cost.fixed + cost.per_token * lengths) / num_layers
    attending = cost.seconds(lengths, ends - lengths) / num_layers - projecting
    sending = link.seconds(ends * bytes_per_token)
    # Times at which a rank has done a layer, its link is free again, and its prefix has arrived
    done, sent, arrived = (np.zeros(lengths.shape) for _ in range(3))
    # A wave: in step `s` rank `i` is in layer `s - i`, so that it waits only for results of the step before
    for step in range(num_layers + num_ranks - 1):
        active = np.s_[..., max(0, step - num_layers + 1) : min(num_ranks, step + 1)]
        ready = np.maximum(done[active] + projecting[active], arrived[active])
        sent[active] = np.maximum(ready, sent[active]) + sending[active]
        done[active] = ready + attending[active]
        arrived[..., 1:] = sent[..., :-1]
    if link.shared:
        # A bound, as if the link were never idle: the order of messages is not simulated
        return np.maximum(done[..., -1], num_layers * sending[..., :-1].sum(axis=-1))
    return done[..., -1]


def plan_over_link(
    length: int,
    num_ranks: int,
    cost: CostModel,
    link: Link,
    bytes_per_token: float,
    num_layers: int,
    *,
    allow_fewer: bool = True,
) -> Partition:
    """
    Cut the slices that are fastest in `predict_ttft`. A search moves the boundaries of slices of equal cost, for one
    rank more after the other, if `allow_fewer`, until two in a row save nothing.
    """
    predict = partial(predict_ttft, cost=cost, link=link, bytes_per_token=bytes_per_token, num_layers=num_layers)
    found: dict[Partition, float] = {}
    num_useless = 0
    for count in range(1 if allow_fewer else num_ranks, num_ranks + 1):
        before = min(found.values(), default=math.inf)
        start = planned(length, count, cost)
        lengths, seconds = search_partition(start, predict, last_step=max(length // _FINEST, 1))
        found[lengths] = seconds
        num_useless = 0 if seconds * (1 + _WORTH_A_RANK) < before else num_useless + 1
        # A search takes longer the more ranks there are
        if num_useless == 2:
            break
    enough = (1 + _WORTH_A_RANK) * min(found.values())
    return min((lengths for lengths, seconds in found.items() if seconds <= enough), key=len)
