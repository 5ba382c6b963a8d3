"""`H2OCache` and its layers: when attention weights are counted, and when tokens are evicted.

Attention over the prompt is exact, and its weights are summed meanwhile. Right after it, layer by layer, all tokens
beyond the budget are evicted. A later token is stored at first. At the *beginning* of the next update the weights of
the last update's queries are added, and tokens beyond the budget are evicted. So a rollback (`crop`) of the newest
update, as in assisted decoding, finds its tokens, and revokes the weights of their queries.

Fused attention does not return weights, and the matrix of all weights is as large as the prompt squared. So scores are
computed for a tile of queries at a time, over all tokens, in float32.

A token is stored in a slot. An evicted token's slot is free for the next token, so that a decode step moves the states
of one token alone. Slots are in no order, and each has the position of its token in the sequence. If many tokens are
evicted at once, as after a prompt, the others are compacted.

Legend: B batch, H key/value heads, G query heads a key/value head, Q queries, S slots, each with a token or free, L
positions of the sequence, D head dim.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import Cache, PreTrainedConfig

from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.kernels.masks import slice_mask
from kvcache_plugins.layers.lazy_layer import LazyLayer
from kvcache_plugins.layers.usage_checks import UsageChecksMixin
from kvcache_plugins.option_checks import check_bool, check_integer, check_number
from kvcache_plugins.registry import get_config
from kvcache_plugins.reports.memory import ReportingMixin, add_stats


# Newest queries of an update whose weights can be revoked: more than any draft has
_NUM_REVOCABLE = 32
# Absorbs rounding, so that 0.29 of 100 tokens are 29
_ROUNDING = 1e-9
FREE = -1
"""Position of a slot without a token."""
# Scores of a tile, over the batch and all heads, by device. On a CPU they stay in its caches: with tiles eight times
# as large or small a prompt's weights take 1.5 times as long. Elsewhere they are enough to pay for a launch. Tensors
# without data (`meta`) need no tiles
_TILE_NUMBERS = {"cpu": 1 << 21, "meta": 1 << 50}
_MANY_NUMBERS = 1 << 25


def weigh(
    call: AttentionCall, keys: torch.Tensor, length: int, positions: torch.Tensor | None = None
) -> Iterator[tuple[slice, torch.Tensor]]:
    """
    Yield the queries of a tile and their softmax weights `[B, H, G, queries, S]`, float32, for keys `[B, H, S, D]`.
    The weights of a fully masked query are zero. Slots at the end that no query of the tile sees may be missing.

    Args:
        call (`AttentionCall`): the attention; its mask is over `length` positions.
        positions (`torch.Tensor` of shape `[B, H, S]`, *optional*): positions of the slots, negative for a free one.
            Without them slots are in the order of positions.
    """
    batch_size, num_heads, num_queries, head_dim = call.query.shape
    num_key_value_heads = keys.shape[1]
    scale = head_dim**-0.5 if call.scale is None else call.scale
    keys = keys.float().transpose(2, 3)
    mask = slice_mask(None if call.is_causal else call.mask, 0, length)
    tile_numbers = _TILE_NUMBERS.get(call.query.device.type, _MANY_NUMBERS)
    tile_length = max(1, tile_numbers // (batch_size * num_heads * keys.shape[3]))
    sinks = call.sinks
    if sinks is not None:
        sinks = sinks.float().expand(batch_size, num_heads, num_queries, 1).unflatten(1, (num_key_value_heads, -1))
    for start in range(0, num_queries, tile_length):
        queries = slice(start, min(start + tile_length, num_queries))
        tile = (call.query[:, :, queries].float() * scale).reshape(batch_size, num_key_value_heads, -1, head_dim)
        scores = tile @ (keys[..., : queries.stop] if call.is_causal and positions is None else keys)
        if call.softcap is not None:
            scores = scores.div_(call.softcap).tanh_().mul_(call.softcap)
        scores = scores.view(batch_size, num_key_value_heads, -1, queries.stop - start, scores.shape[3])
        if call.is_causal:
            _hide_future(scores, queries, positions)
        if positions is not None:
            scores.masked_fill_((positions < 0)[:, :, None, None], -torch.inf)
        if mask is not None:
            own = _read_mask(mask, queries, num_key_value_heads, positions)
            scores = scores.masked_fill_(~own, -torch.inf) if own.dtype == torch.bool else scores.add_(own)
        if sinks is not None:
            yield queries, torch.cat([scores, sinks[:, :, :, queries]], dim=-1).softmax(dim=-1)[..., :-1]
        elif mask is None and positions is None:
            yield queries, scores.softmax(dim=-1)
        else:
            is_masked = scores.amax(dim=-1, keepdim=True) == -torch.inf
            yield queries, scores.softmax(dim=-1).masked_fill_(is_masked, 0)


def _hide_future(scores: torch.Tensor, queries: slice, positions: torch.Tensor | None) -> None:
    """Set scores `[B, H, G, queries, S]` of keys after their query to minus infinity; see `weigh`."""
    own = torch.arange(queries.start, queries.stop, dtype=torch.int64, device=scores.device)[:, None]
    if positions is not None:
        scores.masked_fill_(positions[:, :, None, None] > own, -torch.inf)
        return
    # All queries of the tile see the keys before its first query
    newest = scores[..., queries.start :]
    stop = queries.start + newest.shape[4]
    columns = torch.arange(queries.start, stop, dtype=torch.int64, device=scores.device)
    newest.masked_fill_(columns > own, -torch.inf)


def _read_mask(
    mask: torch.Tensor, queries: slice, num_key_value_heads: int, positions: torch.Tensor | None
) -> torch.Tensor:
    """Return the mask `[B or 1, heads or 1, Q or 1, L]` of some queries, broadcastable to `[B, H, G, queries, S]`."""
    mask = mask if mask.shape[2] == 1 else mask[:, :, queries]
    mask = mask.unflatten(1, (1, 1) if mask.shape[1] == 1 else (num_key_value_heads, -1))
    if positions is None:
        return mask
    index = positions.clamp(min=0).long()[:, :, None, None]
    shape = (*positions.shape[:2], *mask.shape[2:4])
    return mask.expand(*shape, -1).gather(4, index.expand(*shape, -1))


def sum_weights(
    call: AttentionCall, keys: torch.Tensor, length: int, real_queries: torch.Tensor | None
) -> torch.Tensor:
    """Sum the weights `[B, H, L]` that a prompt's tokens get from all heads and all `real_queries` `[B, Q]`."""
    total = keys.new_zeros(keys.shape[:3], dtype=torch.float32)
    for queries, weights in weigh(call, keys, length):
        if real_queries is not None:
            weights = weights * real_queries[:, None, None, queries, None]
        total[:, :, : weights.shape[4]] += weights.sum(dim=(2, 3))
    return total


def attend_and_weigh(
    call: AttentionCall, keys: torch.Tensor, values: torch.Tensor, length: int, positions: torch.Tensor | None = None
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """
    Attend, one tile of queries after the other. Yield the queries, their output `[B, H * G, queries, value head dim]`
    and the weights `[B, H, queries, S]`, summed over the query heads of a key/value head. See `weigh`.
    """
    values = values.float()
    for queries, weights in weigh(call, keys, length, positions):
        output = weights.flatten(2, 3) @ values[:, :, : weights.shape[4]]
        output = output.view(*call.query.shape[:2], queries.stop - queries.start, values.shape[3])
        yield queries, output.to(call.query.dtype), weights.sum(dim=2)


class TokenSlots:
    """
    Slots of tokens.

    Attributes:
        keys, values (`torch.Tensor` of shape `[B, H, S, D]`): states.
        positions (`torch.Tensor` of shape `[B, H, S]`, int32): positions of the tokens, `FREE` for a free slot.
        weights (`torch.Tensor` of shape `[B, H, S]`, float32): attention weights so far.
        newest_weights (`torch.Tensor` of shape `[B, H, queries, S]`, *optional*): weights from the newest queries of
            the last update, which a rollback revokes. There are none while tokens are added or evicted.
        num_used (`int`): upper bound of the tokens of a sequence and head.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor):
        self.keys = keys
        self.values = values
        self.positions = positions.to(torch.int32)
        self.weights = weights.float()
        self.newest_weights: torch.Tensor | None = None
        self.num_used = keys.shape[2]

    def count(self) -> torch.Tensor:
        """Count the tokens of every sequence and head, `[B, H]`."""
        return (self.positions != FREE).sum(dim=2)

    def append(self, keys: torch.Tensor, values: torch.Tensor, start: int) -> None:
        """Add tokens `[B, H, new tokens, D]` from position `start` on, with weights of zero."""
        num_new = keys.shape[2]
        missing = self.num_used + num_new - self.positions.shape[2]
        if missing > 0:
            self.map(lambda tensor: F.pad(tensor, (*[0, 0] * (tensor.dim() - 3), 0, missing), value=FREE))
        # Free slots have the lowest position, and `argmin` is faster than `topk` of one
        if num_new == 1:
            slots = self.positions.argmin(dim=2, keepdim=True)  # [B, H, 1]
        else:
            slots = self.positions.topk(num_new, dim=2, largest=False, sorted=False).indices  # [B, H, new tokens]
        new = torch.arange(start, start + num_new, dtype=torch.int32, device=slots.device)
        self.weights.scatter_(2, slots, 0.0)
        for stored, states in ((self.keys, keys), (self.values, values)):
            stored.scatter_(2, slots[..., None].expand(states.shape), states)
        # Last: until then the slots are free
        self.positions.scatter_(2, slots, new.expand(slots.shape))
        self.num_used += num_new

    def evict(
        self,
        budget: int | torch.Tensor,
        recent_start: int | torch.Tensor,
        first_real: int | torch.Tensor,
        *,
        max_budget: int,
    ) -> None:
        """
        Evict all tokens but those from position `recent_start` on, and those with the largest weights, up to a
        `budget` for each sequence, at most `max_budget`. Evict all tokens before `first_real`. Arguments are numbers
        or `[B, 1, 1]`.
        """
        wanted = self.positions >= first_real
        recent = self.positions >= recent_start
        scores = self.weights.masked_fill(recent, torch.inf).masked_fill(~wanted, -torch.inf)
        # A stable sort makes the order of equal weights independent of the other sequences
        slots = scores.sort(dim=2, descending=True, stable=True).indices
        ranks = torch.arange(self.positions.shape[2], dtype=torch.int64, device=slots.device)
        kept = (ranks < budget) & wanted.gather(2, slots)
        # Compaction pays if an eighth of the slots would be free
        if self.positions.shape[2] > max_budget + max_budget // 8 + 8:
            slots, evicted = slots[:, :, :max_budget], ~kept[:, :, :max_budget]
            self.map(lambda tensor: tensor.gather(2, _as_index(slots, tensor)))
            self.positions.masked_fill_(evicted, FREE)
        else:
            self.positions.masked_fill_(~torch.zeros_like(wanted).scatter_(2, slots, kept), FREE)
        self.num_used = min(self.num_used, max_budget)

    def commit_weights(self) -> None:
        """Add the weights of the newest queries to those so far."""
        if self.newest_weights is not None:
            self.weights.add_(self.newest_weights.sum(dim=2))
            self.newest_weights = None

    def drop_newest(self, count: int, length: int) -> None:
        """Remove the newest `count` of `length` tokens, and revoke the weights of their queries."""
        self.positions = self.positions.masked_fill(self.positions >= length - count, FREE)
        self.num_used = int(self.count().amax())
        if self.newest_weights is not None:
            num_remaining = self.newest_weights.shape[2] - count
            self.newest_weights = self.newest_weights[:, :, :num_remaining].clone() if num_remaining > 0 else None

    def dense(self, side: str, length: int) -> torch.Tensor:
        """Return `"keys"` or `"values"` `[B, H, length, D]` in the order of positions, zero for missing tokens."""
        states: torch.Tensor = getattr(self, side)
        dense = states.new_zeros(*states.shape[:2], length + 1, states.shape[3])
        # Free slots go to the column that is cut off
        index = torch.where(self.positions == FREE, length, self.positions).long()
        return dense.scatter_(2, _as_index(index, states), states)[:, :, :length]

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply `function` to every tensor. If it raises, all are as they were."""
        newest = None if self.newest_weights is None else function(self.newest_weights)
        keys, values = function(self.keys), function(self.values)
        positions, weights = function(self.positions), function(self.weights)
        self.keys, self.values = keys, values
        self.positions, self.weights = positions, weights
        self.newest_weights = newest

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor with the name of its kind."""
        yield "kept", self.keys
        yield "kept", self.values
        yield "index", self.positions
        yield "index", self.weights
        if self.newest_weights is not None:
            yield "index", self.newest_weights


def _as_index(slots: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return slots if tensor.dim() == 3 else slots[..., None].expand(*slots.shape, tensor.shape[3])


@dataclass(frozen=True, kw_only=True, slots=True)
class H2OConfig:
    """Budget of tokens. `H2OCache` explains each field."""

    heavy_ratio: float
    recent_ratio: float
    min_tokens: int
    grow: bool

    def __post_init__(self) -> None:
        for name in ("heavy_ratio", "recent_ratio"):
            check_number(name, getattr(self, name), above=0.0, most=1.0)
        # One heavy and one recent token
        check_integer("min_tokens", self.min_tokens, 2)
        check_bool("grow", self.grow)

    def budget(self, num_tokens: int, prompt_length: int) -> tuple[int, int]:
        """Return the number of tokens that a head keeps of `num_tokens`, and the number of newest ones among them."""
        share = self.heavy_ratio + self.recent_ratio
        total = num_tokens
        if share < 1 - _ROUNDING:
            base = num_tokens if self.grow else min(prompt_length, num_tokens)
            total = min(num_tokens, max(math.floor(share * base + _ROUNDING), self.min_tokens))
        recent = math.floor(total * self.recent_ratio / share + _ROUNDING)
        # At least one recent token, and one heavy token
        return total, min(max(recent, 1), max(total - 1, 1))


class H2OLayer(LazyLayer):
    """Heavy hitters and newest tokens of one layer. Errors name `layer_idx`."""

    counter_names = ("attend_calls", "prompts_without_mask", "updates_without_weights")

    needs_prompt_attention = True
    stores_attention = True

    def __init__(self, config: H2OConfig, layer_idx: int):
        self.config = config
        super().__init__(layer_idx)

    def _clear(self) -> None:
        super()._clear()
        self.slots: TokenSlots | None = None
        self._prompt_length = 0
        # Weights `[B, H, L]` of a prompt that is not committed yet
        self._prompt_weights: torch.Tensor | None = None
        # True if the attention of the last update was seen, or the update was a prompt
        self._attended = False
        # True if the weights of every query were counted
        self._all_weighed = True

    def on_exact_attention(self, call: AttentionCall) -> None:
        # If layers share their states, the first layer's attention counts
        if self._uncommitted_prompt is None:
            return
        if self._length > 1:
            self._learn_padding(call.mask)
        self._left_padding.is_shown = True
        keys, values, _ = self._uncommitted_prompt
        if call.project is not None:
            # All query heads belong to the one head that is stored
            keys = call.project({"keys": keys, "values": values})[0]
        if call.project is None or self._has_one_head:
            num_queries = call.query.shape[2]
            real = self._left_padding.valid_tokens(self._length - num_queries, num_queries, self.device)
            with torch.no_grad():
                weights = sum_weights(call, keys, self._length, real)
            self._prompt_weights = weights if call.project is None else weights.sum(1, True)
        self.commit_prompt()

    @property
    def _has_one_head(self) -> bool:
        return self._shapes["keys"][1] == self._shapes["values"][1] == 1

    def _store_prompt(self, keys: torch.Tensor, values: torch.Tensor, *, is_first: bool) -> None:
        weights = self._prompt_weights
        self._prompt_weights = None
        self._attended = True
        positions = torch.arange(self._length, dtype=torch.int64, device=keys.device).expand(keys.shape[:3])
        self._prompt_length = self._length
        if weights is None:
            self._miss_weights()
            weights = torch.zeros_like(positions)
        self.slots = TokenSlots(keys, values, positions, weights)
        # Without weights all tokens stay, and the next update raises
        if self._all_weighed:
            self._evict()
        if self.slots.positions.shape[2] == self._length:
            # They may be views of larger tensors
            self.slots.map(torch.clone)

    def attend_projected(self, call: AttentionCall) -> torch.Tensor:
        # A projection may mix heads, which hold different tokens
        return self.attend(call) if self._has_one_head else super().attend_projected(call)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Attend over the states in all slots, or over a projection of the only head."""
        self.commit_prompt()
        slots = self.slots
        num_new = self._num_new
        assert slots is not None, "nothing was stored"
        keys, values = slots.keys, slots.values
        if call.project is not None:
            keys, values = call.project({"keys": keys, "values": values})
        if num_new > 1 and not self._attended:
            self._learn_padding(call.mask)
        # Transformers may pass one token's query heads as several queries of their key/value head
        counts = not self._attended and (num_new == 1 or num_new == call.query.shape[2])
        positions = slots.positions.expand(-1, keys.shape[1], -1)
        outputs = []
        for queries, output, weights in attend_and_weigh(call, keys, values, self._length, positions):
            outputs.append(output)
            if counts:
                self._count_weights(queries, weights.detach().sum(1, True) if call.project else weights.detach())
        self._attended = self._attended or counts
        self._counters["attend_calls"] += 1
        return torch.cat(outputs, dim=2)

    def _count_weights(self, queries: slice, weights: torch.Tensor) -> None:
        """Count weights `[B, H, queries, S]` of the last update; keep those that may be revoked apart."""
        slots = self.slots
        assert slots is not None
        if self._num_new == 1:
            weights = weights.sum(dim=2, keepdim=True)
            slots.newest_weights = weights if slots.newest_weights is None else slots.newest_weights + weights
            return
        first = self._length - self._num_new + queries.start
        real = self._left_padding.valid_tokens(first, weights.shape[2], self.device)
        if real is not None:
            weights = weights * real[:, None, :, None]
        num_final = min(max(self._num_new - _NUM_REVOCABLE - queries.start, 0), weights.shape[2])
        slots.weights.add_(weights[:, :, :num_final].sum(dim=2))
        # A copy, as a view would keep the weights of the whole tile
        newest = weights[:, :, num_final:].clone()
        if slots.newest_weights is not None:
            newest = torch.cat([slots.newest_weights, newest], dim=2)
        slots.newest_weights = newest

    def _before_update(self) -> None:
        """Add the weights of the last update, and evict tokens beyond the budget."""
        if self.slots is None:
            return
        if self._num_new and not self._attended:
            self._miss_weights()
            # Not again, should this update fail
            self._attended = True
        self.slots.commit_weights()
        self._evict()

    def _miss_weights(self) -> None:
        self._all_weighed = False
        self._counters["updates_without_weights"] += 1

    def _evict(self) -> None:
        assert self.slots is not None
        padding = [0] if self.padding is None else self.padding.tolist()
        lengths = [self._length - pad for pad in padding]
        budgets = [
            self.config.budget(length, max(self._prompt_length - self._length + length, 0)) for length in lengths
        ]
        totals, recents = zip(*budgets, strict=True)
        if list(totals) == lengths:
            return
        if not self._all_weighed:
            raise ValueError(
                f"layer {self.layer_idx} holds {self._length} tokens and has to drop some, but which ones only "
                "attention weights tell, and the model's attention does not show them to the cache: set "
                "`attn_implementation` to `sdpa` or `eager`, where that is not so already; for a model that writes "
                "attention out in its own code let `heavy_ratio` and `recent_ratio` add up to 1"
            )
        if self.slots.num_used <= min(totals):
            return
        self.slots.evict(
            self._per_sequence(totals),
            self._per_sequence([self._length - recent for recent in recents]),
            self._per_sequence(padding),
            max_budget=max(totals),
        )

    def _per_sequence(self, numbers: list[int] | tuple[int, ...]) -> int | torch.Tensor:
        """Return numbers of all sequences as a tensor `[B, 1, 1]`, or as one number if they are equal."""
        if len(set(numbers)) == 1:
            return numbers[0]
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)[:, None, None]

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        assert self.slots is not None, "a first update is a prompt"
        self.slots.append(keys, values, self._length)
        self._attended = False

    def to_dense(self, side: str) -> torch.Tensor:
        if self._uncommitted_prompt is not None:
            return self._uncommitted_prompt.keys if side == "keys" else self._uncommitted_prompt.values
        if self.slots is None:
            return torch.zeros(self.states_shape(side), dtype=self.dtype, device=self.device)
        if self.num_dropped():
            raise ValueError(
                f"layer {self.layer_idx} has dropped tokens, so there are no dense {side}, and neither attention "
                "weights nor attention that reads them is supported, nor an assistant that shares the model's states: "
                "leave `output_attentions` out, and set "
                "`attn_implementation` to `sdpa` or `eager`; with `heavy_ratio` and `recent_ratio` that add up to 1 "
                "no token is dropped"
            )
        return self.slots.dense(side, self._length)

    def num_dropped(self) -> int:
        """Return the largest number of evicted tokens of a sequence and head."""
        if self.slots is None:
            return 0
        real = self._length if self.padding is None else self._length - self.padding.to(self.device)[:, None]
        return max(int((real - self.slots.count()).amax()), 0)

    def _drop_newest(self, count: int) -> None:
        assert self.slots is not None, "a prompt is stored before it is cropped"
        self.slots.drop_newest(count, self._length)

    def _copied(self) -> dict[str, object]:
        return {**super()._copied(), "slots": copy.copy(self.slots)}

    def _map_stored(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.slots is not None:
            self.slots.map(function)

    def _stored_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.slots is not None:
            yield from self.slots.named_tensors()

    def stats(self) -> dict[str, int]:
        kept = self._length if self.slots is None else int(self.slots.count().amax())
        return {
            "tokens_cached": self._length,
            "tokens_kept": kept,
            "tokens_dropped": self.num_dropped(),
            **self._counters,
        }


class H2OCache(UsageChecksMixin, ReportingMixin, Cache):
    """
    A cache that keeps the tokens with the largest accumulated attention weights and the newest ones, and evicts all
    others.

    Implements [H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language
    Models](https://huggingface.co/papers/2306.14048), the baseline that other methods are measured against. Every
    layer, sequence and key/value head keeps tokens of its own. Weights are summed over all queries and over the query
    heads of a key/value head. Attention over a prompt is exact, and its tokens are evicted right after it, layer by
    layer. Later tokens are evicted at the beginning of the next update (for a prompt in chunks, between the chunks).
    Lengths, positions and masks are those of the whole sequence.

    Weights are computed from queries and keys under `sdpa`, `eager`, `flex_attention` and flash attention. Under any
    other implementation, and in families with attention in their own code, the first update that would have to evict a
    token raises a `ValueError`.

    A `crop` of up to 32 tokens of the newest update, as in assisted decoding, leaves no trace, unless that update was
    the prompt. Any other `crop` removes the tokens, but the weights from their queries stay, and tokens that were
    evicted before do not come back: until new tokens come, the cache holds fewer than its budget.

    See `Cache` for details on common methods that are implemented by all cache classes.

    Args:
        config (`PreTrainedConfig` or `PreTrainedModel`, *optional*): the model, or its config. With it, sliding-window
            and other bounded layers stay Transformers' own; without it, tokens are evicted in every layer.
        heavy_ratio (`float`, *optional*, defaults to 0.1): share of the tokens, above 0, that is kept by weight.
        recent_ratio (`float`, *optional*, defaults to 0.1): share of the tokens, above 0, that is kept by age. If both
            shares add up to 1 or more, no token is evicted.
        min_tokens (`int`, *optional*, defaults to 32): smallest budget, divided in the same proportion. Shorter
            sequences are kept whole.
        grow (`bool`, *optional*, defaults to `True`): take the shares of the current length, so that decoded tokens,
            further chunks of a prompt and further turns enlarge the budget. If false, as in the paper's code, they are
            shares of the first update, the prompt.

    Raises:
        ValueError: if an option is out of range, or `config` has layers that hold full-length states of a kind that
            tokens cannot be evicted from.

    Example:

    ```python
    >>> from kvcache_plugins import H2OCache
    >>> cache = H2OCache(model.config, heavy_ratio=0.05, recent_ratio=0.05)
    >>> outputs = model.generate(**inputs, past_key_values=cache)
    >>> cache.stats()["tokens_dropped"]
    ```
    """

    def __init__(
        self,
        config: PreTrainedConfig | torch.nn.Module | None = None,
        *,
        heavy_ratio: float = 0.1,
        recent_ratio: float = 0.1,
        min_tokens: int = 32,
        grow: bool = True,
    ):
        self._config = H2OConfig(heavy_ratio=heavy_ratio, recent_ratio=recent_ratio, min_tokens=min_tokens, grow=grow)
        self._init_layers(get_config(config, "config"))

    def _layer(self, layer_idx: int) -> H2OLayer:
        return H2OLayer(self._config, layer_idx)

    def stats(self) -> dict[str, int]:
        """
        Return counters over all H2O layers; they are 0 if there are none.

        Returns:
            `dict[str, int]`: `num_layers`, and `layers_dropping` that have evicted tokens; `tokens_cached` (length of
            the sequence); and, summed over layers, `tokens_kept` and `tokens_dropped` (the maxima over sequences and
            heads), `attend_calls` (attentions over kept tokens), `prompts_without_mask`, `updates_without_weights`
            (updates whose attention was not seen), and `dense_reads` (sides of a layer that were made dense for
            something other than attention).
        """
        dropping = sum(layer.num_dropped() > 0 for layer in self.layers if isinstance(layer, H2OLayer))
        return {**add_stats(self.layers, self._layer), "layers_dropping": dropping}
