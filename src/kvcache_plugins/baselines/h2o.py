"""`H2OCache`, its layers and what they keep: which weights are counted when, and when tokens are dropped.

The life of a token: attention over the prompt is exact, its weights are summed up beside it, and right after it,
layer by layer, all but the budget's tokens are dropped. A later token is kept at first; at the *beginning* of the next
update the weights of the last one's queries are added, and what is beyond the budget is dropped. A rollback (`crop`)
of the newest update, as in assisted decoding, thus finds its tokens, and takes the weights of their queries back.

Fused attention never shows its weights, and the matrix of all of them would be as large as the prompt squared. So
scores are computed for as many queries as fit a tile, over all tokens at once, in float32.

A token stands in a slot. A slot whose token is dropped is free, and the next token goes there: a decode step moves one
token's states instead of all. So slots are in no order, and every one says which position of the sequence it holds.
Where many tokens are dropped at once, as after a prompt, the others are moved together.

Legend: B batch, H key/value heads, G query heads a key/value head, Q queries, S slots, each with a token or free, L
positions of the sequence, D head dim.
"""

from __future__ import annotations

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


# Newest queries of an update whose weights can be taken back: more than any draft has
_NUM_REVOCABLE = 32
# So that 0.29 of 100 tokens is 29 of them, whatever floating point makes of it
_ROUNDING = 1e-9
FREE = -1
"""Position of a slot without a token."""
# Scores of a tile, over the whole batch and all heads, by device: what stays in the caches of a CPU (with tiles eight
# times as large or small a prompt's weights take half as long again), and on others enough to pay for a launch.
# Tensors without data (`meta`), on which caches are sized, fill no cache
_TILE_NUMBERS = {"cpu": 1 << 21, "meta": 1 << 50}
_MANY_NUMBERS = 1 << 25


def weigh(
    call: AttentionCall, keys: torch.Tensor, length: int, positions: torch.Tensor | None = None
) -> Iterator[tuple[slice, torch.Tensor]]:
    """
    Computes softmax weights of a call, whose mask is over `length` positions, to keys `[B, H, S, D]` in slots of
    `positions` `[B, H, S]` (negative for a free one; without them in order): yields a tile's queries and weights `[B,
    H, G, queries, S]` in float32, all zero where a query may attend to nothing. Slots that none of them may attend to
    can be missing at the end.
    """
    (batch_size, num_heads, num_queries, head_dim), num_key_value_heads = call.query.shape, keys.shape[1]
    scale = head_dim**-0.5 if call.scale is None else call.scale
    keys, mask = keys.float().transpose(2, 3), slice_mask(None if call.is_causal else call.mask, 0, length)
    tile_numbers = _TILE_NUMBERS.get(call.query.device.type, _MANY_NUMBERS)
    tile_length = max(1, tile_numbers // (batch_size * num_heads * keys.shape[3]))
    sinks = call.sinks
    if sinks is not None:
        sinks = sinks.float().expand(batch_size, num_heads, num_queries, 1).unflatten(1, (num_key_value_heads, -1))
    for start in range(0, num_queries, tile_length):
        rows = slice(start, min(start + tile_length, num_queries))
        tile = (call.query[:, :, rows].float() * scale).reshape(batch_size, num_key_value_heads, -1, head_dim)
        scores = tile @ (keys[..., : rows.stop] if call.is_causal and positions is None else keys)
        if call.softcap is not None:
            scores = scores.div_(call.softcap).tanh_().mul_(call.softcap)
        scores = scores.view(batch_size, num_key_value_heads, -1, rows.stop - start, scores.shape[3])
        if call.is_causal:
            queries = torch.arange(rows.start, rows.stop, dtype=torch.int64, device=scores.device)[:, None]
            if positions is None:
                # What stands before the tile's first query is seen by all of them
                newest = scores[..., rows.start :]
                stop = rows.start + newest.shape[4]
                columns = torch.arange(rows.start, stop, dtype=torch.int64, device=scores.device)
                newest.masked_fill_(columns > queries, -torch.inf)
            else:
                scores.masked_fill_(positions[:, :, None, None] > queries, -torch.inf)
        if positions is not None:
            scores.masked_fill_((positions < 0)[:, :, None, None], -torch.inf)
        if mask is not None:
            own = _read_mask(mask, rows, num_key_value_heads, positions)
            scores = scores.masked_fill_(~own, -torch.inf) if own.dtype == torch.bool else scores.add_(own)
        if sinks is not None:
            yield rows, torch.cat([scores, sinks[:, :, :, rows]], dim=-1).softmax(dim=-1)[..., :-1]
        elif mask is None and positions is None:
            yield rows, scores.softmax(dim=-1)
        else:
            nothing = scores.amax(dim=-1, keepdim=True) == -torch.inf
            yield rows, scores.softmax(dim=-1).masked_fill_(nothing, 0)


def _read_mask(
    mask: torch.Tensor, rows: slice, num_key_value_heads: int, positions: torch.Tensor | None
) -> torch.Tensor:
    """Reads the mask `[B or 1, heads or 1, Q or 1, L]` of some queries, broadcastable to `[B, H, G, queries, S]`."""
    mask = mask if mask.shape[2] == 1 else mask[:, :, rows]
    mask = mask.unflatten(1, (1, 1) if mask.shape[1] == 1 else (num_key_value_heads, -1))
    if positions is None:
        return mask
    index = positions.clamp(min=0).long()[:, :, None, None]
    shape = (*positions.shape[:2], *mask.shape[2:4])
    return mask.expand(*shape, -1).gather(4, index.expand(*shape, -1))


def sum_weights(
    call: AttentionCall, keys: torch.Tensor, length: int, real_queries: torch.Tensor | None
) -> torch.Tensor:
    """Sums the weights `[B, H, L]` that a prompt's tokens get from all heads and all `real_queries` `[B, Q]`."""
    total = keys.new_zeros(keys.shape[:3], dtype=torch.float32)
    for rows, weights in weigh(call, keys, length):
        if real_queries is not None:
            weights = weights * real_queries[:, None, None, rows, None]
        total[:, :, : weights.shape[4]] += weights.sum(dim=(2, 3))
    return total


def attend_and_weigh(
    call: AttentionCall, keys: torch.Tensor, values: torch.Tensor, length: int, positions: torch.Tensor | None = None
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """
    Attends, a tile of queries after another: yields them, their output `[B, H * G, queries, value head dim]` and the
    weights `[B, H, queries, S]`, summed over the heads of a group. See `weigh`.
    """
    values = values.float()
    for rows, weights in weigh(call, keys, length, positions):
        output = weights.flatten(2, 3) @ values[:, :, : weights.shape[4]]
        output = output.view(*call.query.shape[:2], rows.stop - rows.start, values.shape[3])
        yield rows, output.to(call.query.dtype), weights.sum(dim=2)


class KeptTokens:
    """
    Keeps `keys`, `values` `[B, H, S, D]`, `positions` `[B, H, S]` (`FREE` for none) and `weights` `[B, H, S]` so far.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor):
        self.keys, self.values, self.positions, self.weights = keys, values, positions.to(torch.int32), weights.float()
        # Slots with a token, at most, of any item and head
        self.num_used = keys.shape[2]

    def count(self) -> torch.Tensor:
        """Counts the tokens of every item and head, `[B, H]`."""
        return (self.positions != FREE).sum(dim=2)

    def append(self, keys: torch.Tensor, values: torch.Tensor, start: int) -> None:
        """Adds the tokens `[B, H, new tokens, D]` from position `start` on, without weights so far."""
        num_new = keys.shape[2]
        self.num_used += num_new
        if (missing := self.num_used - self.positions.shape[2]) > 0:
            self.map(lambda tensor: F.pad(tensor, (*[0, 0] * (tensor.dim() - 3), 0, missing), value=FREE))
        # Free slots are the ones of the lowest position; the minimum is found faster than the least of one
        if num_new == 1:
            slots = self.positions.argmin(dim=2, keepdim=True)  # [B, H, 1]
        else:
            slots = self.positions.topk(num_new, dim=2, largest=False, sorted=False).indices  # [B, H, new tokens]
        new = torch.arange(start, start + num_new, dtype=torch.int32, device=slots.device)
        self.positions.scatter_(2, slots, new.expand(slots.shape))
        self.weights.scatter_(2, slots, 0.0)
        for stored, states in ((self.keys, keys), (self.values, values)):
            stored.scatter_(2, slots[..., None].expand(states.shape), states)

    def keep(
        self,
        budget: int | torch.Tensor,
        recent_start: int | torch.Tensor,
        first_real: int | torch.Tensor,
        *,
        max_budget: int,
    ) -> None:
        """
        Drops all but the newest tokens, from position `recent_start` on, and those with the largest weights, to a
        `budget` an item, at most `max_budget`; before `first_real` none is kept. All are `[B, 1, 1]` or numbers.
        """
        wanted = self.positions >= first_real
        recent = self.positions >= recent_start
        scores = self.weights.masked_fill(recent, torch.inf).masked_fill(~wanted, -torch.inf)
        # Stable, so that equal weights are told apart in the same way whatever stands beside an item
        slots = scores.sort(dim=2, descending=True, stable=True).indices
        places = torch.arange(self.positions.shape[2], dtype=torch.int64, device=slots.device)
        kept = (places < budget) & wanted.gather(2, slots)
        # Moving tokens together pays where an eighth of the slots would be free
        if self.positions.shape[2] > max_budget + max_budget // 8 + 8:
            slots, kept = slots[:, :, :max_budget], kept[:, :, :max_budget]
            self.map(lambda tensor: tensor.gather(2, _as_index(slots, tensor)))
            self.positions.masked_fill_(~kept, FREE)
        else:
            self.positions.masked_fill_(~torch.zeros_like(wanted).scatter_(2, slots, kept), FREE)
        self.num_used = min(self.num_used, max_budget)

    def drop_from(self, position: int) -> None:
        """Drops the tokens from `position` on."""
        self.positions.masked_fill_(self.positions >= position, FREE)
        self.num_used = int(self.count().amax())

    def dense(self, side: str, length: int) -> torch.Tensor:
        """Returns `"keys"` or `"values"` `[B, H, length, D]` at their positions, zeros where there is none."""
        states: torch.Tensor = getattr(self, side)
        dense = states.new_zeros(*states.shape[:2], length + 1, states.shape[3])
        # What is free goes where it is cut off
        index = torch.where(self.positions == FREE, length, self.positions).long()
        return dense.scatter_(2, _as_index(index, states), states)[:, :, :length]

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces every tensor by `function` of it."""
        self.keys, self.values = function(self.keys), function(self.values)
        self.positions, self.weights = function(self.positions), function(self.weights)


def _as_index(slots: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return slots if tensor.dim() == 3 else slots[..., None].expand(*slots.shape, tensor.shape[3])


@dataclass(frozen=True, kw_only=True, slots=True)
class H2OConfig:
    """How many tokens are kept. See `H2OCache` for the meaning of each field."""

    heavy_ratio: float
    recent_ratio: float
    min_tokens: int
    grow: bool

    def __post_init__(self) -> None:
        for name in ("heavy_ratio", "recent_ratio"):
            check_number(name, getattr(self, name), above=0.0, most=1.0)
        # A heavy and a recent token
        check_integer("min_tokens", self.min_tokens, 2)
        check_bool("grow", self.grow)

    def budget(self, num_tokens: int, prompt_length: int) -> tuple[int, int]:
        """Returns how many real tokens a head keeps of `num_tokens`, and of those the newest."""
        share = self.heavy_ratio + self.recent_ratio
        total = num_tokens
        if share < 1 - _ROUNDING:
            base = num_tokens if self.grow else min(prompt_length, num_tokens)
            total = min(num_tokens, max(math.floor(share * base + _ROUNDING), self.min_tokens))
        recent = math.floor(total * self.recent_ratio / share + _ROUNDING)
        # At least one is kept for its weight and one for being the newest
        return total, min(max(recent, 1), max(total - 1, 1))


class H2OLayer(LazyLayer):
    """The heavy hitters and the newest tokens of one layer, as many as `config` says; errors name `layer_idx`."""

    counter_names = ("attend_calls", "prompts_without_mask", "updates_without_weights")

    needs_prompt_attention = True
    stores_attention = True

    def __init__(self, config: H2OConfig, layer_idx: int):
        self.config = config
        super().__init__(layer_idx)

    def _clear(self) -> None:
        super()._clear()
        self.kept: KeptTokens | None = None
        self._prompt_length = 0
        # Of the prompt while it waits, `[B, H, L]`
        self._prompt_weights: torch.Tensor | None = None
        # Of the newest queries of the last update, one by one: `[B, H, queries, S]`
        self._revocable: torch.Tensor | None = None
        # Tokens of the last update that are still there, and whether attention was seen since
        self._num_latest = 0
        self._attended = False
        # Whether every query's weights could be counted
        self._all_weighed = True

    def on_exact_attention(self, call: AttentionCall) -> None:
        # Where layers share their states, the first one's attention counts
        if self._pending is None:
            return
        if self._length > 1:
            self._learn_padding(call.mask)
        self._mask_seen = True
        keys, values = self._pending
        if call.project is not None:
            # All query heads are of the one head, however many its states are projected to
            keys = call.project({"keys": keys, "values": values})[0]
        if call.project is None or self._has_one_head:
            num_queries = call.query.shape[2]
            real = self._valid_tokens(self._length - num_queries, num_queries)
            with torch.no_grad():
                weights = sum_weights(call, keys, self._length, real)
            self._prompt_weights = weights if call.project is None else weights.sum(1, True)
        self.commit_prompt()

    @property
    def _has_one_head(self) -> bool:
        return self._shapes["keys"][1] == self._shapes["values"][1] == 1

    def _store_prompt(self, keys: torch.Tensor, values: torch.Tensor, *, is_first: bool) -> None:
        weights, self._prompt_weights = self._prompt_weights, None
        positions = torch.arange(self._length, dtype=torch.int64, device=keys.device).expand(keys.shape[:3])
        self._prompt_length = self._length
        if weights is None:
            self._miss_weights()
            weights = torch.zeros_like(positions)
        self.kept = KeptTokens(keys, values, positions, weights)
        # What cannot be chosen stays whole; the next update says why it cannot be
        if self._all_weighed:
            self._evict()
        if self.kept.positions.shape[2] == self._length:
            # Views of more than is needed, perhaps
            self.kept.map(torch.clone)

    def attend_projected(self, call: AttentionCall) -> torch.Tensor:
        # Of several heads each has tokens of its own, which a projection may mix
        return self.attend(call) if self._has_one_head else super().attend_projected(call)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Attends over the states in all slots, of the heads that are stored or of what the only one projects to."""
        self.commit_prompt()
        kept, num_new = self.kept, self._num_latest
        assert kept is not None, "nothing was stored"
        keys, values = kept.keys, kept.values
        if call.project is not None:
            keys, values = call.project({"keys": keys, "values": values})
        if num_new > 1:
            self._learn_padding(call.mask)
        # Transformers hands one token's query heads over as rows of their key/value head
        counts = not self._attended and (num_new == 1 or num_new == call.query.shape[2])
        positions = kept.positions.expand(-1, keys.shape[1], -1)
        outputs = []
        for rows, output, weights in attend_and_weigh(call, keys, values, self._length, positions):
            outputs.append(output)
            if counts:
                self._count_weights(rows, weights.detach().sum(1, True) if call.project else weights.detach())
        self._attended = self._attended or counts
        self._counters["attend_calls"] += 1
        return torch.cat(outputs, dim=2)

    def _count_weights(self, rows: slice, weights: torch.Tensor) -> None:
        """Notes weights `[B, H, queries, S]` of the last update, those that may be taken back by themselves."""
        assert self.kept is not None
        if self._num_latest == 1:
            weights = weights.sum(dim=2, keepdim=True)
            self._revocable = weights if self._revocable is None else self._revocable + weights
            return
        first = self._length - self._num_latest + rows.start
        real = self._valid_tokens(first, weights.shape[2])
        if real is not None:
            weights = weights * real[:, None, :, None]
        num_final = min(max(self._num_latest - _NUM_REVOCABLE - rows.start, 0), weights.shape[2])
        self.kept.weights.add_(weights[:, :, :num_final].sum(dim=2))
        newest = weights[:, :, num_final:]
        self._revocable = newest if self._revocable is None else torch.cat([self._revocable, newest], dim=2)

    def _before_update(self) -> None:
        """Adds the weights of the last update and drops what is beyond the budget."""
        if self.kept is None:
            return
        if self._num_latest and not self._attended:
            self._miss_weights()
        self._num_latest = 0
        if self._revocable is not None:
            self.kept.weights.add_(self._revocable.sum(dim=2))
            self._revocable = None
        self._evict()

    def _miss_weights(self) -> None:
        self._all_weighed = False
        self._counters["updates_without_weights"] += 1

    def _evict(self) -> None:
        assert self.kept is not None
        # An item is as long as the sequence without its padding
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
        if self.kept.num_used <= min(totals):
            return
        self.kept.keep(
            self._per_item(totals),
            self._per_item([self._length - recent for recent in recents]),
            self._per_item(padding),
            max_budget=max(totals),
        )

    def _per_item(self, numbers: list[int] | tuple[int, ...]) -> int | torch.Tensor:
        if len(set(numbers)) == 1:
            return numbers[0]
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)[:, None, None]

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        assert self.kept is not None, "a first update is a prompt"
        self.kept.append(keys, values, self._length)
        self._num_latest, self._attended = keys.shape[2], False

    def to_dense(self, side: str) -> torch.Tensor:
        self.commit_prompt()
        if self.kept is None:
            return torch.zeros(self.states_shape(side), dtype=self.dtype, device=self.device)
        if self.num_dropped():
            raise ValueError(
                f"layer {self.layer_idx} has dropped tokens, so there are no dense {side}, and neither attention "
                "weights nor attention that reads them is supported, nor an assistant that shares the model's states: "
                "leave `output_attentions` out, and set "
                "`attn_implementation` to `sdpa` or `eager`; with `heavy_ratio` and `recent_ratio` that add up to 1 "
                "no token is dropped"
            )
        return self.kept.dense(side, self._length)

    def num_dropped(self) -> int:
        """Counts the tokens that are missing, at most, of any item and head."""
        if self.kept is None:
            return 0
        real = self._length if self.padding is None else self._length - self.padding.to(self.device)[:, None]
        return max(int((real - self.kept.count()).amax()), 0)

    def _drop_newest(self, count: int) -> None:
        assert self.kept is not None, "a prompt is stored before it is cropped"
        self.kept.drop_from(self._length - count)
        self._num_latest = max(self._num_latest - count, 0)
        if self._revocable is not None:
            num_left = self._revocable.shape[2] - count
            self._revocable = self._revocable[:, :, :num_left].clone() if num_left > 0 else None

    def _map_stored(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.kept is not None:
            self.kept.map(function)
        if self._revocable is not None:
            self._revocable = function(self._revocable)

    def _stored_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.kept is not None:
            yield from (("kept", states) for states in (self.kept.keys, self.kept.values))
            yield from (("index", numbers) for numbers in (self.kept.positions, self.kept.weights))
        if self._revocable is not None:
            yield "index", self._revocable

    def stats(self) -> dict[str, int]:
        kept = self._length if self.kept is None else int(self.kept.count().amax())
        return {
            "tokens_cached": self._length,
            "tokens_kept": kept,
            "tokens_dropped": self.num_dropped(),
            **self._counters,
            "dense_reads": self.dense_reads,
        }


class H2OCache(UsageChecksMixin, ReportingMixin, Cache):
    """
    A cache that keeps the tokens with the largest accumulated attention weights and the newest ones, and drops all
    others for good.

    Implements [H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language
    Models](https://huggingface.co/papers/2306.14048), the baseline that other methods are measured against. Every
    layer, item of a batch and key/value head keeps tokens of its own; weights are summed over all queries and over the
    query heads of a group. A prompt is attended to exactly and dropped from right after its attention, layer by layer;
    beyond it, tokens are dropped at the beginning of the next update (and of a prompt in chunks, between the chunks).
    Lengths, positions and masks are those of the whole sequence.

    Weights are computed from queries and keys under `sdpa`, `eager`, `flex_attention` and flash attention. Under any
    other implementation, and of families that write attention out in their own code, the first update that would have
    to drop a token raises a `ValueError`.

    A `crop` of up to 32 tokens of the newest update, as in assisted decoding, leaves no trace, unless that update was
    the prompt. Any other `crop` removes what it is asked to remove, but the weights that the removed queries gave
    stay, and tokens that were dropped in the meantime do not come back: the cache holds fewer tokens than its budget
    until new ones come.

    See `Cache` for details on common methods that are implemented by all cache classes.

    Args:
        config (`PreTrainedConfig` or `PreTrainedModel`, *optional*): the model, or its config. With it, sliding-window
            and other bounded layers stay Transformers' own and tokens are dropped in full-attention layers only;
            without it, in every layer.
        heavy_ratio (`float`, *optional*, defaults to 0.1): share of the tokens, above 0, that is kept for its weights.
        recent_ratio (`float`, *optional*, defaults to 0.1): share of the tokens, above 0, that is kept for being the
            newest. Nothing is ever dropped if both add up to 1 or more.
        min_tokens (`int`, *optional*, defaults to 32): tokens that are kept at least, whatever the shares, in the same
            proportion: shorter sequences stay whole.
        grow (`bool`, *optional*, defaults to `True`): whether both are shares of the current length, so that tokens
            that are decoded, or come with a chunk of a prompt or another turn, enlarge the budget. Otherwise, as in
            the paper's code, they are shares of the first update, the prompt, and stay what they are.

    Raises:
        ValueError: if an option is out of range, or `config` has layers that hold full-length states of a kind that
            tokens cannot be dropped of.

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
        Counters over all H2O layers, 0 if there are none.

        Returns:
            `dict[str, int]`: `num_layers` and, of those, `layers_dropping` that have dropped tokens; `tokens_cached`
            (tokens of the sequence); and, summed over layers, `tokens_kept` and `tokens_dropped` (of the item and head
            that has most of them), `attend_calls` (attentions over what was kept), `prompts_without_mask` and
            `updates_without_weights` (those whose attention was not seen), and `dense_reads` (times a side of a layer
            was made dense for something other than `sdpa`).
        """
        dropping = sum(layer.num_dropped() > 0 for layer in self.layers if isinstance(layer, H2OLayer))
        return {**add_stats(self.layers, self._layer), "layers_dropping": dropping}
