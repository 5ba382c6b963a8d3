"""The baseline that KV-Runahead is measured against: tensor/sequence-parallel prefill (TSP), with an all-gather.

Every rank runs the whole model on an even slice of the prompt. In every layer all ranks gather the keys and values of
all of them, and only then attend: all wait for all, and everything goes everywhere.

It has the attention of KV-Runahead, which looks at nothing that a query may not see, though the rank has received it.
So what is measured between the two is slices and communication, and not kernels.
"""

import time

import torch
import torch.distributed as dist
from transformers import DynamicCache, PreTrainedModel

from kvcache_plugins.kv_runahead.chain import Chain, PrefixExchange, PromptSlice
from kvcache_plugins.kv_runahead.messages import MessageLayout, message_layouts
from kvcache_plugins.kv_runahead.planner import CostModel, Link
from kvcache_plugins.kv_runahead.prefill import RunaheadOutput
from kvcache_plugins.kv_runahead.transport import Neighbours
from kvcache_plugins.models.cache_argument import as_argument


# The name of it from PyTorch 2.13 on, which warns of the old one
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class GatheringExchange(PrefixExchange):
    """The exchange of TSP: all ranks give states, not the one before. None without a token, by a `ValueError`."""

    def __init__(self, group: dist.ProcessGroup | None, layouts: list[MessageLayout], *, length: int, batch_size: int):
        rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        # Rounded up: what ranks contribute has to be of one length, and the last may have less
        self._share = -(-length // self._size)
        if length <= self._share * (self._size - 1):
            raise ValueError(f"`input_ids` has {length} tokens, too few for an even slice for {self._size} ranks")
        self._length = length
        start, stop = rank * self._share, min((rank + 1) * self._share, length)
        # The first that takes part: it waits for none before it
        neighbours = Neighbours(group, first=rank, run=-1)
        super().__init__(neighbours, layouts, PromptSlice(start=start, stop=stop, batch_size=batch_size))
        self.partition = (*[self._share] * (self._size - 1), length - self._share * (self._size - 1))

    def exchange(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gathers a layer's states; returns those up to the end of the slice, or of them what a window needs."""
        part, layout, num_new = self.prompt_slice, self.layouts[layer_idx], keys.shape[2]
        kept = layout.num_kept(part.start)
        own = layout.make_rows(self._share, part.batch_size)
        layout.write(own[:num_new], keys, values)
        rows = layout.make_rows(self._share * self._size, part.batch_size)
        start = time.perf_counter()
        _gather(rows, own, group=self.neighbours.group)
        self.neighbours.seconds_waited += time.perf_counter() - start
        # Around a ring every rank passes on what all but its next one have
        self.neighbours.bytes_sent += own.nbytes * (self._size - 1)
        self.neighbours.bytes_received += own.nbytes * (self._size - 1)
        self.entries_sent += 2 * num_new * (self._size - 1)
        self.dot_products += num_new * self._length
        return (keys, values) if kept == 0 else layout.read(rows[part.start - kept : part.stop])


@torch.no_grad()
def tsp_prefill(
    model: PreTrainedModel, input_ids: torch.Tensor, group: dist.ProcessGroup | None = None
) -> RunaheadOutput:
    """
    Prefills a prompt `[batch_size, length]` without padding by TSP; called by every rank of a group with the same.

    The last rank gets the logits of the last token and a `DynamicCache`, as from KV-Runahead. Of `stats`,
    `dot_products` are the paper's, every query by every key, of which fewer are computed; `seconds_waited` is the time
    in all-gathers. A prompt too short to give every rank a slice raises a `ValueError`.
    """
    start = time.perf_counter()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    config = model.config.get_text_config(decoder=True)
    cache = DynamicCache(config=config) if rank == size - 1 else None
    batch_size, length = input_ids.shape
    exchange = GatheringExchange(group, message_layouts(model), length=length, batch_size=batch_size)
    chain = Chain(exchange, is_lazy=config._attn_implementation == "sdpa", cache=cache)
    ids, logits = input_ids[:, exchange.prompt_slice.start : exchange.prompt_slice.stop], None
    with chain.running():
        if cache is None:
            # Without the language-model head
            model.base_model(ids, **as_argument(chain.cache), use_cache=True)
        else:
            logits = model(ids, **as_argument(chain.cache), use_cache=True, logits_to_keep=1).logits
    stats = {"seconds": time.perf_counter() - start, **exchange.stats()}
    return RunaheadOutput(past_key_values=cache, logits=logits, partition=exchange.partition, rank=rank, stats=stats)


def predict_tsp_ttft(
    length: int, num_ranks: int, cost: CostModel, link: Link, bytes_per_token: float, num_layers: int
) -> float:
    """Simulates the seconds of TSP, where all ranks wait for the slowest in every layer. Arguments: `predict_ttft`."""
    share = length / num_ranks
    # Around a ring: each rank passes on the share of every other
    num_messages = (num_ranks - 1) * (num_ranks if link.shared else 1)
    gathering = num_messages * link.seconds(share * bytes_per_token)
    return cost.seconds(share, length - share) + num_layers * gathering
