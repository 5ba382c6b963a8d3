"""A rank's part in one prefill: the layers of its forward, what they exchange, and the cache that ends up filled.

On the last rank the layers stand in the user's own cache while the forward runs. As soon as a layer has attended, the
user's layer gets the prompt, compresses or stores it as it would its own, and takes its place again: no more than one
layer's prompt is ever held dense beside it (two, where attention does not tell when it is done).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvcache_plugins.layers.prompt_layer import PromptLayer

from .communication import RECEIVES_AHEAD, Neighbours, RunaheadError
from .layer import RunaheadLayer
from .wire import Wire


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Rows of a layer on their way, and its sliding window, if it has one."""

    wire: Wire
    window: int | None

    def num_kept(self, position: int) -> int:
        """Tokens before `position` that any token from there on can see."""
        return position if self.window is None else min(position, self.window - 1)


class Chain:
    """
    Used in a `with` statement around one forward.

    Args:
        neighbours (`Neighbours`): the neighbours.
        shapes (`list[LayerShape]`): of every layer.
        start, stop (`int`): the rank's slice of the prompt.
        padding (`list[int]`, *optional*): padding at the start of every item of the prompt.
        batch_size (`int`): items of the prompt.
        is_lazy (`bool`): whether attention is by `sdpa`.
        cache (`Cache`, *optional*): the user's empty cache, on the last rank.

    Attributes:
        cache (`Cache`): what the forward takes as `past_key_values`.
        dot_products (`int`): pairs of queries and keys that lay before attention, for one head, summed over layers.
        entries_sent (`int`): keys and values, counted apart, that one head sent, summed over layers.
        hop_errors (`list[float]`): relative error of this rank's quantized states, layer by layer.
    """

    def __init__(
        self,
        neighbours: Neighbours,
        shapes: list[LayerShape],
        *,
        start: int,
        stop: int,
        padding: list[int] | None,
        batch_size: int,
        is_lazy: bool,
        cache: Cache | None,
    ):
        self.neighbours, self.start, self.stop, self.is_lazy = neighbours, start, stop, is_lazy
        self._shapes, self._padding, self._batch_size = shapes, padding, batch_size
        self._layers = [RunaheadLayer(self, index, shape.window) for index, shape in enumerate(shapes)]
        self._is_last = cache is not None
        self.cache = Cache(layers=list(self._layers)) if cache is None else cache
        # The user's own layers while others stand in their place
        self._own: list[Any] = []
        # Buffers of receives posted and not yet waited for
        self._posted: dict[int, torch.Tensor] = {}
        # The layer whose attention may still be under way
        self._unfinished: int | None = None
        self.dot_products, self.entries_sent = 0, 0
        self.hop_errors: list[float] = []

    def __enter__(self) -> Chain:
        if self._is_last:
            self._own = list(self.cache.layers)
            while len(self._own) < len(self._layers):
                # Caches made without a config add layers as they are asked for
                make_layer: Any = self.cache.layer_class_to_replicate
                self._own.append(make_layer())
            self.cache.layers[:] = self._layers
        self._post_receives(0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._finish_previous()
                self.neighbours.flush()
        except BaseException as late:
            error = late
            raise
        finally:
            self._put_back(error)
        if error is not None and isinstance(error, Exception) and not isinstance(error, (RunaheadError, ValueError)):
            raise RunaheadError(f"rank {self.neighbours.rank}: {type(error).__name__}: {error}") from error

    def _put_back(self, error: BaseException | None) -> None:
        """The user's layers into their places, emptied if something went wrong: half filled may not look complete."""
        if self._is_last:
            self.cache.layers[:] = self._own
        if error is not None:
            for layer in self._own:
                layer.reset()
            self.neighbours.report_failure(error)

    def padding_for(self, batch_size: int) -> list[int] | None:
        """Padding of every item of a forward, which may repeat the prompt's items for beams."""
        if self._padding is None:
            return None
        repeats = batch_size // self._batch_size
        return [count for count in self._padding for _ in range(repeats)]

    def _post_receives(self, layer_idx: int) -> None:
        """Posts the receives of the layers from `layer_idx` on, a few of them."""
        if self.neighbours.before is None:
            return
        for index in range(layer_idx, min(layer_idx + RECEIVES_AHEAD, len(self._shapes))):
            if index not in self._posted:
                kept = self._shapes[index].num_kept(self.start)
                # With room for the slice behind the prefix
                rows = self._shapes[index].wire.make_rows(kept + self.stop - self.start, self._batch_size)
                self.neighbours.post_receive(index, rows[:kept])
                self._posted[index] = rows

    def _receive(self, layer_idx: int) -> torch.Tensor:
        """Rows of a layer: what is kept of the prefix, and room for the slice."""
        if self.neighbours.before is None:
            return self._shapes[layer_idx].wire.make_rows(self.stop - self.start, self._batch_size)
        self.neighbours.wait_for(layer_idx)
        rows = self._posted.pop(layer_idx)
        self._post_receives(layer_idx + 1)
        return rows

    def exchange(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Waits for the prefix of a layer and sends it on with the slice.

        Args:
            layer_idx (`int`): the layer.
            keys, values (`torch.Tensor` of shape `[batch_size, num_heads, slice, head_dim]`): of the slice.

        Returns:
            Keys and values of the prefix, or what the layer's window needs of it, and of the slice.
        """
        self._finish_previous()
        self._unfinished = layer_idx
        shape = self._shapes[layer_idx]
        kept, wire = shape.num_kept(self.start), shape.wire
        rows = self._receive(layer_idx)
        self.dot_products += keys.shape[2] * (kept + keys.shape[2])
        if self.neighbours.behind is not None:
            wire.write(rows[kept:], keys, values)
            sent = rows[rows.shape[0] - shape.num_kept(self.stop) :]
            self.neighbours.send(layer_idx, sent)
            self.entries_sent += 2 * sent.shape[0]
            if wire.nbits is not None:
                self._note_error(wire.read(rows[kept:]), (keys, values))
        if kept == 0:
            return keys, values
        if wire.nbits is None and keys.shape[0] == self._batch_size:
            if self.neighbours.behind is None:
                wire.write(rows[kept:], keys, values)
            return wire.read(rows)
        # The rank's own states are exact for itself; and beams repeat what has come for the prompt
        repeats = keys.shape[0] // self._batch_size
        before = (states.repeat_interleave(repeats, dim=0) for states in wire.read(rows[:kept]))
        all_keys, all_values = (
            torch.cat([prefix, own], dim=2) for prefix, own in zip(before, (keys, values), strict=True)
        )
        return all_keys, all_values

    def _note_error(self, rounded: tuple[torch.Tensor, ...], exact: tuple[torch.Tensor, ...]) -> None:
        for approximation, states in zip(rounded, exact, strict=True):
            error = (approximation.float() - states.float()).norm() / states.float().norm().clamp(min=1e-30)
            self.hop_errors.append(float(error))

    def own_layer(self, layer_idx: int) -> Any:
        """The user's layer, which has the prompt when this returns; `None` on ranks before the last."""
        self._finish_previous()
        return self._own[layer_idx] if self._is_last else None

    def _finish_previous(self) -> None:
        """What `finish_layer` does, for a layer whose attention did not say that it is done."""
        if self._unfinished is not None:
            self.finish_layer(self._unfinished)

    def finish_layer(self, layer_idx: int) -> None:
        """Lets go of a layer's states: into the user's cache on the last rank."""
        self._unfinished = None
        states = self._layers[layer_idx].take_states()
        if not self._is_last or states is None:
            return
        keys, values = states
        own = self._own[layer_idx]
        if isinstance(own, PromptLayer):
            padding = self.padding_for(keys.shape[0])
            own.take_prompt(keys, values, None if padding is None else torch.tensor(padding, device=keys.device))
        else:
            own.update(keys, values)
            if isinstance(own, DynamicSlidingWindowLayer):
                # It was shown its window alone
                own.cumulative_length = self.stop
            if self.cache.offloading:
                own.offload()
        self.cache.layers[layer_idx] = own
