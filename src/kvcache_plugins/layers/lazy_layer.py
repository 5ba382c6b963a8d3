"""`LazyLayer`: the base of every layer that hands out `LazyStates`."""

import copy
import inspect
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from kvcache_plugins.kernels.attention import OnlineAttention
from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.kernels.masks import slice_mask

from .contexts import in_own_context
from .lazy_states import LazyStates


# Before 5.15 `crop(n)` with a positive `n` means "down to n tokens"; since then only "remove -n tokens" exists
_CROP_TAKES_LENGTH = "max_length" in inspect.signature(DynamicLayer.crop).parameters


class LazyLayer(CacheLayerMixin):
    """
    Base of the layers that hand out `LazyStates`.

    A subclass stores what it likes, says how to attend to it (`attend`) and how to make it dense (`materialize`), and
    lists its tensors once (`map_tensors`, `named_tensors`): batch operations, offloading and the memory report follow
    from that.
    """

    is_sliding = False
    is_croppable = True
    is_compileable = False
    # Whether attention over one new token adds to what is stored, beside what `update` stores
    stores_attention = False
    # Set from the first states, in `lazy_initialization`
    dtype: torch.dtype
    device: torch.device

    def __init__(self) -> None:
        # Not the mixin's, which assigns `keys` and `values`: here they are views of the storage
        self.is_initialized = False
        self.dense_reads = 0
        # Whether autograd records the newest states
        self.has_gradients = False

    def __getattr__(self, name: str) -> Any:
        # Only what is nowhere else: a model whose layers keep more than keys and values asks its own kind of layer
        raise AttributeError(
            f"`{type(self).__name__}` has no `{name}`. If the model asked for it, its layers keep states in a form of "
            "their own: make the cache for the model's config, which says whether it can be used"
        )

    @in_own_context
    def __deepcopy__(self, memo: dict[int, Any]) -> "LazyLayer":
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    @abstractmethod
    def attend(self, call: AttentionCall) -> torch.Tensor:
        """
        Attend to everything the layer holds, as it is stored.

        Args:
            call (`AttentionCall`): the call, without `project`.

        Returns:
            `torch.Tensor` of shape `[batch_size, num_heads, num_queries, value_head_dim]`.
        """

    def attend_projected(self, call: AttentionCall) -> torch.Tensor:
        """
        Attend to what a call projects of everything the layer holds, a tile of tokens at a time.

        Args:
            call (`AttentionCall`): the call, with `project`.

        Returns:
            `torch.Tensor` of shape `[batch_size, num_heads, num_queries, value_head_dim]`.
        """
        assert call.project is not None
        attention: OnlineAttention | None = None
        mask = call.full_mask(self.lazy_length())
        for tokens, tile in self.dense_tiles(("keys", "values")):
            keys, values = call.project(tile)
            if attention is None:
                attention = OnlineAttention(call.query, keys.shape[1], call.scale, call.softcap, call.sinks)
            attention.add_tile(keys, values, slice_mask(mask, tokens.start, tokens.stop))
        assert attention is not None, "nothing is stored"
        return attention.result()

    def attend_again(self, query: torch.Tensor, num_tokens: int, scale: float | None) -> torch.Tensor | None:
        """
        Attention of `query` over everything as of the token before, with nothing hidden, in any context of PyTorch.

        Args:
            query, scale: as in `AttentionCall`.
            num_tokens (`int`): tokens that the lazy states which are attended to report.

        Returns:
            `torch.Tensor` as `attend` returns it; `None` if nothing is prepared for that.
        """
        return None

    @abstractmethod
    def materialize(self, side: str) -> torch.Tensor:
        """
        All `"keys"` or `"values"` as a dense tensor `[batch_size, num_heads, seq_len, head_dim]` in the layer's dtype.
        """

    def dense_tiles(self, sides: Collection[str]) -> Iterator[tuple[slice, Mapping[str, torch.Tensor]]]:
        """
        Sides as `materialize` has them, some tokens at a time and all of them in order, for attention over what is
        projected. A layer that need not make them whole overrides this; here they are, and that is counted.

        Yields:
            Which tokens, and by side their states `[batch_size, num_heads, tokens, head_dim]` in the layer's dtype.
        """
        whole = {side: self.materialize(side) for side in sides}
        for side in whole:
            self.on_dense_read(side)
        yield slice(0, self.get_seq_length()), whole

    @abstractmethod
    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces every stored tensor by `function` of it; the batch is the first dimension of each."""

    @abstractmethod
    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Part (`codes`, `scales`, `residual`, ...) and tensor of everything stored."""

    def host_tensors(self) -> Iterator[torch.Tensor]:
        """What of the same stands in host memory, wherever the model computes; nothing by default."""
        return iter(())

    def shared_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor of what all caches of the model share, which is none of the above; nothing by default."""
        return iter(())

    @abstractmethod
    def num_values(self) -> int:
        """How many key and value numbers a dense cache of the same tokens would hold."""

    @abstractmethod
    def stats(self) -> Mapping[str, float]:
        """Counters that prove the layer was exercised."""

    @abstractmethod
    def crop_tokens(self, count: int) -> None:
        """Removes the newest `count` tokens, at least 1 and at most all of them."""

    def lazy_length(self) -> int:
        """Tokens that the newest lazy states report; older ones, of before a `crop`, report others."""
        return self.get_seq_length()

    def on_exact_attention(self, call: AttentionCall) -> None:
        """
        Called after attention over exact states that `update` handed out: the place to store them, queries and mask
        being known.
        """

    def on_dense_read(self, side: str) -> None:
        """Called when something other than attention has made one side dense."""
        self.dense_reads += 1

    @property
    def keys(self) -> LazyStates | None:  # type: ignore[override]
        return self._stored_states("keys")

    @property
    def values(self) -> LazyStates | None:  # type: ignore[override]
        return self._stored_states("values")

    def _stored_states(self, side: str) -> LazyStates | None:
        if not self.is_initialized:
            return None
        return LazyStates(self, side, self.states_shape(side), self.dtype, self.device)

    @abstractmethod
    def states_shape(self, side: str) -> tuple[int, int, int, int]:
        """The shape that the dense states of one side have."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    # The name of `get_max_length` in earlier releases of Transformers 5
    get_max_cache_shape = get_max_length

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the newest `-tokens_to_remove` tokens; 0 changes nothing."""
        if tokens_to_remove > 0:
            if not _CROP_TAKES_LENGTH:
                raise ValueError(
                    f"`tokens_to_remove` has to be a negative number of tokens, or 0, but got {tokens_to_remove}"
                )
            tokens_to_remove = min(tokens_to_remove - self.get_seq_length(), 0)
        count = min(-tokens_to_remove, self.get_seq_length())
        if count > 0:
            self.crop_tokens(count)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.map_tensors(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.map_tensors(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.map_tensors(lambda tensor: tensor[indices.to(tensor.device)])

    def offload(self) -> None:
        self.map_tensors(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        if self.is_initialized:
            self.map_tensors(lambda tensor: tensor.to(self.device, non_blocking=True))
