"""One layer of a rank in the chain: it lives for one forward, that of the rank's slice of the prompt.

Under `sdpa` it announces only its own slice to those who make masks, at its true position, and hands out lazy states
of that length: no mask of slice x prefix is made, and attention, which the lazy states bring here, sees everything.
Any other implementation gets the prefix and the slice dense, with lengths to match.
"""

from collections.abc import Callable, Iterator

import torch

from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.layers.lazy_layer import LazyLayer
from kvcache_plugins.layers.lazy_states import LazyStates

from .attention import attend_behind_prefix
from .exchange import PrefixExchange
from .handover import Handover


class RunaheadLayer(LazyLayer):
    """
    Keys and values of one layer on one rank, [KV-Runahead](https://huggingface.co/papers/2405.05329).

    Args:
        exchange (`PrefixExchange`): how the rank gets what comes before its slice.
        handover (`Handover`): takes the states when attention is done.
        layer_idx (`int`): index of the layer.
        window (`int`, *optional*): sliding window of the layer.
        is_lazy (`bool`): whether attention is by `sdpa`.
    """

    is_croppable = False

    def __init__(
        self, exchange: PrefixExchange, handover: Handover, layer_idx: int, window: int | None, *, is_lazy: bool
    ):
        super().__init__()
        self._exchange, self._handover, self._slice = exchange, handover, exchange.prompt_slice
        self._layer_idx, self.window, self._is_lazy = layer_idx, window, is_lazy
        self.is_sliding = window is not None
        # Keys and values of the prefix, or what a window needs of it, and of the slice
        self._states: tuple[torch.Tensor, torch.Tensor] | None = None
        self._length = self._slice.start

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    @torch.compiler.disable
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Takes the slice's states `[batch_size, num_heads, slice, head_dim]`, waits for those of the prefix, sends both
        on, and returns them, lazily under `sdpa`.

        Raises:
            RunaheadError: if a neighbour does not answer.
            ValueError: if the states are not those of the slice.
        """
        part = self._slice
        own = self._handover.own_layer(self._layer_idx) if self._length == part.stop else None
        if own is not None:
            # Attention did not tell that it was done, and `generate` has gone on
            return own.update(key_states, value_states, *args, **kwargs)
        if self._length != part.start or key_states.shape[2] != part.num_tokens:
            raise ValueError(
                f"rank {self._exchange.neighbours.rank} prefills the tokens {part.start} to {part.stop} in one "
                f"forward, but its layer {self._layer_idx} got {key_states.shape[2]} tokens at position "
                f"{self._length}. `prefill_chunk_size`, and drafts, cannot be combined with it"
            )
        self.lazy_initialization(key_states, value_states)
        self._handover.begin(self._layer_idx, self.take_states)
        keys, values = self._states = self._exchange.exchange(self._layer_idx, key_states, value_states)
        self._length = part.stop
        if not self._is_lazy:
            return keys, values
        sides = ("keys", key_states), ("values", value_states)
        lazy_keys, lazy_values = (
            LazyStates(self, side, tuple(states.shape), self.dtype, self.device) for side, states in sides
        )
        return lazy_keys, lazy_values

    def attend(self, call: AttentionCall) -> torch.Tensor:
        assert self._states is not None
        query, part, (keys, values) = call.query, self._slice, self._states
        if call.mask is not None and call.mask.dtype != torch.bool:
            raise ValueError(
                "`model`: attention adds a bias to its scores, which is not known for the tokens of other ranks; "
                "`model.set_attn_implementation('eager')` takes the exact way"
            )
        # A single new token comes with the query heads of a group as rows
        rows = query.reshape(query.shape[0], -1, part.num_tokens, query.shape[3])
        # The window's first key may stand behind some padding
        first = part.stop - keys.shape[2]
        padding = part.padding_for(query.shape[0])
        output = attend_behind_prefix(
            rows,
            keys,
            values,
            scale=call.scale,
            padding=None if padding is None else [max(count - first, 0) for count in padding],
            window=self.window,
        )
        self._handover.finish_layer()
        return output.reshape(*query.shape[:3], -1)

    def take_states(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys and values, which the layer lets go of."""
        states, self._states = self._states, None
        return states

    def lazy_length(self) -> int:
        return self._slice.num_tokens

    def get_seq_length(self) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self._is_lazy:
            return query_length, self._length
        start = max(self._length - self.window + 1, 0) if self.window is not None else 0
        return self._length - start + query_length, start

    def materialize(self, side: str) -> torch.Tensor:
        # Whoever wants dense states got a mask that was made for the slice alone
        raise ValueError(
            "`model`: its attention does not go through `scaled_dot_product_attention`, though its implementation is "
            "called `sdpa`; `model.set_attn_implementation('eager')` takes the exact way"
        )

    def states_shape(self, side: str) -> tuple[int, int, int, int]:
        assert self._states is not None
        batch_size, num_heads, length, head_dim = self._states[side == "values"].shape
        return batch_size, num_heads, length, head_dim

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self._states is not None:
            keys, values = self._states
            self._states = function(keys), function(values)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for states in self._states or ():
            yield "prefix", states

    def num_values(self) -> int:
        return sum(states.numel() for states in self._states or ())

    def stats(self) -> dict[str, int]:
        return {"tokens_cached": self._length}

    def crop_tokens(self, count: int) -> None:
        raise ValueError("`tokens_to_remove`: the prompt is being prefilled; crop what `runahead_prefill` returns")

    def offload(self) -> None:
        """Nothing: what is held is about to be used."""

    def prefetch(self) -> None:
        """Nothing: it is there."""

    def reset(self) -> None:
        self._states, self._length, self.is_initialized = None, self._slice.start, False
