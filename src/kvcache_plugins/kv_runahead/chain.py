"""A rank's part in one prefill: its layers during the forward over its slice of the prompt.

In each layer a rank gets the prefix from the rank before, and sends it on with its own slice. Under `sdpa` a layer
announces only its own slice to those who make masks, and hands out lazy states of that length: no mask of slice x
prefix is made. Any other implementation gets the prefix and the slice dense.

On the last rank these layers stand in the user's own cache. As soon as one has attended, the user's layer gets the
prompt and takes its place again: no more than one layer's prompt is held dense beside it (two, where attention does
not tell when it is done).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import Cache
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.layers.lazy_kv import make_lazy_kv
from kvcache_plugins.layers.lazy_layer import LazyLayer

from .attention import attend_behind_prefix
from .messages import MessageLayout
from .transport import RECEIVES_AHEAD, Neighbours, RunaheadError


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSlice:
    """Tokens of a prompt that one rank prefills, and padding at the start of every sequence."""

    start: int
    stop: int
    batch_size: int
    padding: list[int] | None = None

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    def padding_for(self, batch_size: int, first: int = 0) -> list[int] | None:
        """Lists the padding from `first` on of a forward's sequences, which may repeat the prompt's for beams."""
        if self.padding is None:
            return None
        return [max(count - first, 0) for count in self.padding for _ in range(batch_size // self.batch_size)]


class PrefixExchange:
    """The states of one rank's slice, and of what stands before it, layer by layer; counters: `RunaheadOutput`."""

    def __init__(self, neighbours: Neighbours, layouts: list[MessageLayout], prompt_slice: PromptSlice):
        self.neighbours, self.layouts, self.prompt_slice = neighbours, layouts, prompt_slice
        # Buffers of receives posted and not yet waited for
        self._posted: dict[int, torch.Tensor] = {}
        self.dot_products, self.entries_sent = 0, 0
        self.hop_errors: list[float] = []

    def exchange(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Waits for a layer's prefix, sends it on with the slice, and returns the states of both, or what a window needs.
        """
        layout, part = self.layouts[layer_idx], self.prompt_slice
        kept, is_last = layout.num_kept(part.start), self.neighbours.behind is None
        rows = self._receive(layer_idx)
        self.dot_products += keys.shape[2] * (kept + keys.shape[2])
        # The rank's own states are exact for itself; and beams repeat what has come for the prompt
        is_whole = kept > 0 and layout.nbits is None and keys.shape[0] == part.batch_size
        if is_whole or not is_last:
            layout.write(rows[kept:], keys, values)
        if not is_last:
            sent = rows[rows.shape[0] - layout.num_kept(part.stop) :]
            self.neighbours.send(layer_idx, sent)
            self.entries_sent += 2 * sent.shape[0]
            if layout.nbits is not None:
                for rounded, exact in zip(layout.read(rows[kept:]), (keys, values), strict=True):
                    error = (rounded.float() - exact.float()).norm() / exact.float().norm().clamp(min=1e-30)
                    self.hop_errors.append(float(error))
        if kept == 0 or is_whole:
            return layout.read(rows) if is_whole else (keys, values)
        repeats = keys.shape[0] // part.batch_size
        before_keys, before_values = (states.repeat_interleave(repeats, dim=0) for states in layout.read(rows[:kept]))
        return torch.cat([before_keys, keys], dim=2), torch.cat([before_values, values], dim=2)

    def stats(self) -> dict[str, int | float]:
        """Returns counters, as of `RunaheadOutput`, and those of the neighbours."""
        names = ("seconds_waited", "bytes_sent", "bytes_received")
        found: dict[str, int | float] = {name: getattr(self.neighbours, name) for name in names}
        found |= {"dot_products": self.dot_products, "entries_sent": self.entries_sent}
        if self.hop_errors:
            found["hop_error"] = sum(self.hop_errors) / len(self.hop_errors)
        return found

    def post_receives(self, layer_idx: int = 0) -> None:
        """Posts the receives of a few layers from `layer_idx` on."""
        part = self.prompt_slice
        for index in range(layer_idx, min(layer_idx + RECEIVES_AHEAD, len(self.layouts))):
            if self.neighbours.before is not None and index not in self._posted:
                kept = self.layouts[index].num_kept(part.start)
                # With capacity for the slice behind the prefix
                rows = self.layouts[index].make_rows(kept + part.num_tokens, part.batch_size)
                self.neighbours.post_receive(index, rows[:kept])
                self._posted[index] = rows

    def _receive(self, layer_idx: int) -> torch.Tensor:
        """Returns rows of a layer: what is kept of the prefix, and uninitialized ones for the slice."""
        if self.neighbours.before is None:
            return self.layouts[layer_idx].make_rows(self.prompt_slice.num_tokens, self.prompt_slice.batch_size)
        self.neighbours.wait_for(layer_idx)
        self.post_receives(layer_idx + 1)
        return self._posted.pop(layer_idx)


class RunaheadLayer(LazyLayer):
    """Keys and values of one layer on one rank, lazy if attention is by `sdpa`."""

    is_croppable = False

    def __init__(self, chain: Chain, layer_idx: int, window: int | None, *, is_lazy: bool):
        super().__init__(layer_idx)
        self._chain, self._slice = chain, chain.prompt_slice
        self.sliding_window, self.is_sliding, self._is_lazy = window, window is not None, is_lazy
        # Keys and values of the prefix, or what a window needs of it, and of the slice
        self.states: tuple[torch.Tensor, torch.Tensor] | None = None
        self._length = self._slice.start

    @torch.compiler.disable
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Takes the slice's states and returns them behind the prefix, lazily under `sdpa`; others are a `ValueError`.
        """
        part = self._slice
        if self._length == part.stop:
            # Attention did not tell that it was done, and `generate` has gone on
            self._chain.finish_layer()
        if self._length == part.stop and self._chain.own:
            own = self._chain.own[self.layer_idx]
            return own.update(key_states, value_states, *args, **kwargs)  # type: ignore[no-any-return]
        if self._length != part.start or key_states.shape[2] != part.num_tokens:
            raise ValueError(
                f"rank {self._chain.exchange.neighbours.rank} prefills the tokens {part.start} to {part.stop} in one "
                f"forward, but its layer {self.layer_idx} got {key_states.shape[2]} tokens at position "
                f"{self._length}. `prefill_chunk_size`, and drafts, cannot be combined with it"
            )
        self.lazy_initialization(key_states, value_states)
        self._chain.finish_layer()
        self._chain.unfinished = self.layer_idx
        keys, values = self.states = self._chain.exchange.exchange(self.layer_idx, key_states, value_states)
        self._length = part.stop
        if not self._is_lazy:
            return keys, values
        shapes = key_states.shape, value_states.shape
        return make_lazy_kv(self, *shapes, part.num_tokens, self.dtype, self.device)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        assert self.states is not None
        query, part, (keys, values) = call.query, self._slice, self.states
        if call.mask is not None and call.mask.dtype != torch.bool:
            raise ValueError(
                "`model`: attention adds a bias to its scores, which is not known for the tokens of other ranks; "
                "`model.set_attn_implementation('eager')` takes the exact way"
            )
        # A single new token comes with the query heads of a group as rows
        rows = query.reshape(query.shape[0], -1, part.num_tokens, query.shape[3])
        # The window's first key may stand behind some padding
        padding = part.padding_for(query.shape[0], part.stop - keys.shape[2])
        window = self.sliding_window
        output = attend_behind_prefix(rows, keys, values, scale=call.scale, padding=padding, window=window)
        self._chain.finish_layer()
        return output.reshape(*query.shape[:3], -1)

    def lazy_length(self) -> int:
        return self._slice.num_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (query_length, self._length) if self._is_lazy else super().get_mask_sizes(query_length)

    def materialize(self, side: str) -> torch.Tensor:
        # Whoever wants dense states got a mask that was made for the slice alone
        raise ValueError(
            "`model`: its attention does not go through `scaled_dot_product_attention`, though its implementation is "
            "called `sdpa`; `model.set_attn_implementation('eager')` takes the exact way"
        )

    def states_shape(self, side: str) -> tuple[int, int, int, int]:
        assert self.states is not None
        batch_size, num_heads, length, head_dim = self.states[side == "values"].shape
        return batch_size, num_heads, length, head_dim

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.states is not None:
            self.states = function(self.states[0]), function(self.states[1])

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for states in self.states or ():
            yield "prefix", states

    def stats(self) -> dict[str, int]:
        return {"tokens_cached": self._length}

    def crop_tokens(self, count: int) -> None:
        raise ValueError("`tokens_to_remove`: the prompt is being prefilled; crop what `runahead_prefill` returns")

    def offload(self) -> None:
        """Keeps the states: they are about to be used."""

    prefetch = offload

    def reset(self) -> None:
        self.states, self._length, self.is_initialized = None, self._slice.start, False


class Chain:
    """
    Runs a rank's part in one forward; the last rank fills the user's empty `cache`, the others drop their states.
    """

    layer_class = RunaheadLayer

    def __init__(self, exchange: PrefixExchange, *, is_lazy: bool, cache: Cache | None):
        self.exchange, self.prompt_slice, self._given = exchange, exchange.prompt_slice, cache
        self._layers = [
            self.layer_class(self, index, layout.window, is_lazy=is_lazy)
            for index, layout in enumerate(exchange.layouts)
        ]
        self.cache = Cache(layers=list(self._layers)) if cache is None else cache
        # The user's own layers while others stand in their place
        self.own: list[Any] = []
        # The layer whose attention may still be under way
        self.unfinished: int | None = None

    @contextmanager
    def running(self) -> Iterator[Cache]:
        """Has its layers stand in the cache; the user's are put back, emptied if something goes wrong."""
        if self._given is not None:
            self.own, make_layer = list(self._given.layers), cast("Any", self._given.layer_class_to_replicate)
            # Caches made without a config add layers as they are asked for
            self.own += [make_layer() for _ in self._layers[len(self.own) :]]
            self._given.layers[:] = self._layers
        try:
            self.exchange.post_receives()
            yield self.cache
            self.finish_layer()
            self.exchange.neighbours.flush()
        except BaseException as error:
            # Half filled it may not look complete
            for layer in self.own:
                layer.reset()
            self.exchange.neighbours.failures.add(error)
            if not isinstance(error, Exception) or isinstance(error, (RunaheadError, ValueError)):
                raise
            raise RunaheadError(f"rank {self.exchange.neighbours.rank}: {type(error).__name__}: {error}") from error
        finally:
            if self._given is not None:
                self._given.layers[:] = self.own

    def finish_layer(self) -> None:
        """Drops the states of the layer that began last: into the user's cache on the last rank."""
        if self.unfinished is None:
            return
        layer_idx, self.unfinished = self.unfinished, None
        states, self._layers[layer_idx].states = self._layers[layer_idx].states, None
        if self._given is None or states is None:
            return
        keys, values = states
        own = self.own[layer_idx]
        if isinstance(own, LazyLayer) and own.is_sliding and keys.shape[2] < self.prompt_slice.stop:
            # Where tokens stand in the sequence is not known of a window alone: it stays exact
            own = self.own[layer_idx] = DynamicSlidingWindowLayer(own.get_max_length())
        if isinstance(own, LazyLayer):
            padding = self.prompt_slice.padding_for(keys.shape[0])
            counts = None if padding is None else torch.tensor(padding, dtype=torch.int64, device=keys.device)
            own.take_prompt(keys, values, counts)
        else:
            own.update(keys, values)
            if isinstance(own, DynamicSlidingWindowLayer):
                # It was shown its window alone
                own.cumulative_length = self.prompt_slice.stop
            if self._given.offloading:
                own.offload()
        self._given.layers[layer_idx] = own
