"""Baselines of KV-Runahead: tensor/sequence-parallel prefill (TSP) with an all-gather, of even slices or a zig-zag.

Every rank runs the whole model on as many tokens of the prompt. In every layer all ranks gather the keys and values of
all of them, and only then attend: all wait for all, and everything goes everywhere. Of even slices the last attends to
most; in a zig-zag, as context parallelism of training has it, a rank has one chunk of the prompt's first half and one
of its second, folded so that all have equal work.

Both have the attention of KV-Runahead, which looks at nothing that a query may not see, though the rank has received
it. So what is measured between them is slices and communication, and not kernels.
"""

import time
from typing import Any

import torch
import torch.distributed as dist
from transformers import DynamicCache, PreTrainedModel

from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.kv_runahead.attention import attend_behind_prefix
from kvcache_plugins.kv_runahead.chain import Chain, PrefixExchange, PromptSlice, RunaheadLayer
from kvcache_plugins.kv_runahead.messages import MessageLayout, message_layouts
from kvcache_plugins.kv_runahead.planner import CostModel, Link
from kvcache_plugins.kv_runahead.prefill import RunaheadOutput
from kvcache_plugins.kv_runahead.transport import Neighbours
from kvcache_plugins.models.cache_argument import as_argument


# The name of it from PyTorch 2.13 on, which warns of the old one
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class GatheringExchange(PrefixExchange):
    """
    The exchange of TSP over N ranks: all give states, not the one before. A rank has one slice of the prompt; folded,
    of 2 N chunks, numbers N - 1 - r and N + r, so that the last rank has the last token. None without a token, and no
    window of a folded prompt, by a `ValueError`.
    """

    def __init__(self, layouts: list[MessageLayout], *, length: int, batch_size: int, is_folded: bool):
        rank, self._size, self._length = dist.get_rank(), dist.get_world_size(), length
        numbers = (self._size - 1 - rank, self._size + rank) if is_folded else (rank,)
        num_chunks = len(numbers) * self._size
        # Rounded up: what ranks contribute has to be of one length, and the last may have less
        self._chunk = -(-length // num_chunks)
        if length <= self._chunk * (num_chunks - 1):
            raise ValueError(f"`input_ids` has {length} tokens, too few for {num_chunks} even slices")
        if is_folded and any(layout.window is not None for layout in layouts):
            raise ValueError("`model`: prompts are not folded for layers that have windows")
        self.chunks = [slice(each * self._chunk, min((each + 1) * self._chunk, length)) for each in numbers]
        stop, num_tokens = self.chunks[-1].stop, sum(each.stop - each.start for each in self.chunks)
        # The first that takes part: it waits for none before it
        neighbours = Neighbours(None, first=rank, run=-1)
        super().__init__(neighbours, layouts, PromptSlice(start=stop - num_tokens, stop=stop, batch_size=batch_size))
        self._share = len(numbers) * self._chunk
        self.partition = (*[self._share] * (self._size - 1), length - self._share * (self._size - 1))

    def exchange(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gathers a layer's states; returns those up to the end of the slice, or of them what a window needs."""
        part, layout, num_new = self.prompt_slice, self.layouts[layer_idx], keys.shape[2]
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
        kept = layout.num_kept(part.start)
        if kept == 0:
            return keys, values
        if len(self.chunks) > 1:
            # In the order of the prompt, whose first half the ranks have from its end on
            first, second = rows.unflatten(0, (self._size, 2, self._chunk)).unbind(1)
            rows = torch.cat((first.flip(0).flatten(0, 1), second.flatten(0, 1)))
        return layout.read(rows[part.start - kept : part.stop])


class FoldedLayer(RunaheadLayer):
    """A layer whose rank has two chunks of the prompt, each behind all tokens before it."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        assert self.states is not None and isinstance(exchange := self._chain.exchange, GatheringExchange)
        query, outputs, first = call.query, [], 0
        rows = query.reshape(query.shape[0], -1, self._slice.num_tokens, query.shape[3])
        for chunk in exchange.chunks:
            stop = first + chunk.stop - chunk.start
            keys, values = (states[:, :, : chunk.stop] for states in self.states)
            outputs.append(attend_behind_prefix(rows[:, :, first:stop], keys, values, scale=call.scale))
            first = stop
        self._chain.finish_layer()
        return torch.cat(outputs, dim=2).reshape(*query.shape[:3], -1)


class FoldedChain(Chain):
    """A rank's part in a zig-zag."""

    layer_class = FoldedLayer


@torch.no_grad()
def tsp_prefill(model: PreTrainedModel, input_ids: torch.Tensor, *, is_folded: bool = False) -> RunaheadOutput:
    """
    Prefills a prompt `[batch_size, length]` without padding by TSP; called by every rank with the same.

    The last rank gets the logits of the last token and a `DynamicCache`, as from KV-Runahead. Of `stats`,
    `dot_products` are the paper's, every query by every key, of which fewer are computed; `seconds_waited` is the time
    in all-gathers. A prompt too short to give every rank its share raises a `ValueError`.
    """
    start = time.perf_counter()
    rank, size = dist.get_rank(), dist.get_world_size()
    config = model.config.get_text_config(decoder=True)
    cache = DynamicCache(config=config) if rank == size - 1 else None
    batch_size, length = input_ids.shape
    layouts = message_layouts(model)
    exchange = GatheringExchange(layouts, length=length, batch_size=batch_size, is_folded=is_folded)
    is_lazy = config._attn_implementation == "sdpa" or is_folded
    chain = (FoldedChain if is_folded else Chain)(exchange, is_lazy=is_lazy, cache=cache)
    chunks = [list(range(each.start, each.stop)) for each in exchange.chunks]
    positions = torch.tensor(sum(chunks, []), dtype=torch.int64, device="cpu")
    ids, position_ids = input_ids[:, positions], positions[None].to(input_ids.device)
    logits = None
    with chain.running():
        options: Any = {**as_argument(chain.cache), "position_ids": position_ids, "use_cache": True}
        if cache is None:
            # Without the language-model head
            model.base_model(ids, **options)
        else:
            logits = model(ids, **options, logits_to_keep=1).logits
    stats = {"seconds": time.perf_counter() - start, **exchange.stats()}
    return RunaheadOutput(past_key_values=cache, logits=logits, partition=exchange.partition, rank=rank, stats=stats)


def predict_tsp_ttft(
    length: int,
    num_ranks: int,
    cost: CostModel,
    link: Link,
    bytes_per_token: float,
    num_layers: int,
    *,
    is_folded: bool = False,
    is_ring: bool = False,
) -> float:
    """Simulates TSP: all wait for the slowest in every layer; a ring sends while ranks attend. See `predict_ttft`."""
    share = length / num_ranks
    # Around a ring: each rank passes on the share of every other
    num_messages = (num_ranks - 1) * (num_ranks if link.shared else 1)
    gathering = num_messages * link.seconds(share * bytes_per_token)
    computing = cost.seconds(share, length - share)
    if is_folded:
        # The last rank's: chunks at both ends of the prompt
        computing = cost.seconds(share / 2, 0) + cost.seconds(share / 2, length - share / 2) - cost.fixed
    computing /= num_layers
    return num_layers * (max(computing, gathering) if is_ring else computing + gathering)
