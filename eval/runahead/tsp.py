"""Baselines of KV-Runahead: tensor/sequence-parallel prefill (TSP) with an all-gather, of even slices or a zig-zag.

Every rank runs the whole model on equally many tokens of the prompt. In every layer all ranks first gather the keys
and values of all tokens, for which each waits for all others, and then attend. The last of even slices attends to the
most tokens. In a zig-zag, as in context parallelism of training, a rank has one chunk of the prompt's first half and
one of its second half, so that all ranks have equal work.

Both use the attention of KV-Runahead, which skips tokens that a query may not see even if the rank has received them.
So measurements compare slices and communication, not kernels.
"""

import time

import torch
import torch.distributed as dist
from transformers import DynamicCache, PreTrainedModel

from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.kv_runahead.attention import attend_behind_prefix
from kvcache_plugins.kv_runahead.messages import MessageLayout, message_layouts
from kvcache_plugins.kv_runahead.planner import CostModel, Link
from kvcache_plugins.kv_runahead.prefill import RunaheadOutput
from kvcache_plugins.kv_runahead.prefix_exchange import PrefixExchange, PromptSlice
from kvcache_plugins.kv_runahead.runahead_layer import RunaheadLayer, SlicePrefill
from kvcache_plugins.kv_runahead.transport import Neighbours
from kvcache_plugins.models.cache_argument import as_argument


# PyTorch 2.13 renamed it, and warns of the old name
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class GatheringExchange(PrefixExchange):
    """
    Exchange of TSP over N ranks: every rank gets the states of all others. Rank r has one even slice of the prompt, or
    folded the chunks N - 1 - r and N + r of 2 N, so that the last rank has the last token.

    Raises a `ValueError` if a rank would have no token, and for sliding windows of a folded prompt.
    """

    def __init__(self, layouts: list[MessageLayout], *, length: int, batch_size: int, is_folded: bool):
        rank, self._size = dist.get_rank(), dist.get_world_size()
        self._length = length
        numbers = (self._size - 1 - rank, self._size + rank) if is_folded else (rank,)
        num_chunks = len(numbers) * self._size
        # Rounded up: all contributions have one length, and the last may be partly filled
        self._chunk = -(-length // num_chunks)
        if length <= self._chunk * (num_chunks - 1):
            raise ValueError(f"`input_ids` has {length} tokens, too few for {num_chunks} even slices")
        if is_folded and any(layout.window is not None for layout in layouts):
            raise ValueError("`model`: prompts are not folded for layers that have windows")
        self.chunks = [slice(each * self._chunk, min((each + 1) * self._chunk, length)) for each in numbers]
        stop, num_tokens = self.chunks[-1].stop, sum(each.stop - each.start for each in self.chunks)
        # The first rank that takes part waits for no rank before it
        neighbours = Neighbours(None, first=rank, run=-1)
        super().__init__(neighbours, layouts, PromptSlice(start=stop - num_tokens, stop=stop, batch_size=batch_size))
        self._share = len(numbers) * self._chunk
        self.partition = (*[self._share] * (self._size - 1), length - self._share * (self._size - 1))

    def exchange(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather a layer's states; return those up to the end of the slice, or as much of them as a window sees."""
        part, layout, num_new = self.prompt_slice, self.layouts[layer_idx], keys.shape[2]
        own = layout.make_rows(self._share, part.batch_size)
        layout.write(own[:num_new], keys, values)
        rows = layout.make_rows(self._share * self._size, part.batch_size)
        start = time.perf_counter()
        _gather(rows, own, group=self.neighbours.group)
        self.neighbours.seconds_waited += time.perf_counter() - start
        # Around a ring every rank passes on the states of all ranks but the next one
        self.neighbours.bytes_sent += own.nbytes * (self._size - 1)
        self.neighbours.bytes_received += own.nbytes * (self._size - 1)
        self.entries_sent += 2 * num_new * (self._size - 1)
        self.dot_products += num_new * self._length
        kept = layout.num_kept(part.start)
        if kept == 0:
            return keys, values
        if len(self.chunks) > 1:
            # Into the order of the prompt: ranks have its first half in reverse
            first, second = rows.unflatten(0, (self._size, 2, self._chunk)).unbind(1)
            rows = torch.cat((first.flip(0).flatten(0, 1), second.flatten(0, 1)))
        return layout.read(rows[part.start - kept : part.stop])


class FoldedLayer(RunaheadLayer):
    """A layer whose rank has two chunks of the prompt, each behind all tokens before it."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        exchange = self._prefill.exchange
        assert self.states is not None and isinstance(exchange, GatheringExchange)
        query = call.query
        outputs = []
        first = 0
        rows = query.reshape(query.shape[0], -1, self._slice.num_tokens, query.shape[3])
        for chunk in exchange.chunks:
            stop = first + chunk.stop - chunk.start
            keys, values = (states[:, :, : chunk.stop] for states in self.states)
            outputs.append(attend_behind_prefix(rows[:, :, first:stop], keys, values, scale=call.scale))
            first = stop
        self._prefill.finish_layer()
        return torch.cat(outputs, dim=2).reshape(*query.shape[:3], -1)


class FoldedPrefill(SlicePrefill):
    """Prefill of a rank's two chunks in a zig-zag."""

    layer_class = FoldedLayer


@torch.no_grad()
def tsp_prefill(model: PreTrainedModel, input_ids: torch.Tensor, *, is_folded: bool = False) -> RunaheadOutput:
    """
    Prefill a prompt `[batch_size, length]` without padding by TSP; called by every rank with the same prompt.

    The last rank gets the logits of the last token and a `DynamicCache`, as from KV-Runahead. In `stats`,
    `dot_products` are the paper's, every query by every key, though fewer are computed; `seconds_waited` is the time
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
    own = (FoldedPrefill if is_folded else SlicePrefill)(exchange, is_lazy=is_lazy, cache=cache)
    chunks = [list(range(each.start, each.stop)) for each in exchange.chunks]
    positions = torch.tensor(sum(chunks, []), dtype=torch.int64, device="cpu")
    ids, position_ids = input_ids[:, positions], positions[None].to(input_ids.device)
    logits = None
    with own.running():
        options = {**as_argument(own.cache), "position_ids": position_ids, "use_cache": True}
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
    """Simulate TSP: all wait for the slowest in every layer; a ring sends while ranks attend. See `predict_ttft`."""
    share = length / num_ranks
    # Around a ring each rank passes on the share of every other
    num_messages = (num_ranks - 1) * (num_ranks if link.shared else 1)
    gathering = num_messages * link.seconds(share * bytes_per_token)
    computing = cost.seconds(share, length - share)
    if is_folded:
        # The last rank has chunks at both ends of the prompt
        computing = cost.seconds(share / 2, 0) + cost.seconds(share / 2, length - share / 2) - cost.fixed
    computing /= num_layers
    return num_layers * (max(computing, gathering) if is_ring else computing + gathering)
