"""Lazy keys and values of one layer in one pass: new tokens, and those before them in pages of rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from kvcache_plugins.formats.parts import Part
from kvcache_plugins.kernels.attention import attend
from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.kernels.engine import choose_kernel
from kvcache_plugins.kernels.ops import decode_tiles
from kvcache_plugins.layers.lazy_kv import HandedOut, LazyKV, make_lazy_kv
from kvcache_plugins.user_warnings import warn_user

from .paged_allocator import CodedAllocator
from .request_batch import RequestBatch


@dataclass(eq=False)
class PagedStates:
    """
    Keys and values that `LazyKV` refer to, as to those of a layer of a cache.

    Attributes:
        allocator (`CodedAllocator`): owner of the pages.
        layer_idx (`int`): the layer.
        batches (`list[RequestBatch]`): all requests of the pass.
        exact (`list[torch.Tensor]`): exact tokens of each batch before the pass, as `read_exact` returns them.
        new (two `torch.Tensor` of shape `[1, H, tokens, D]`): keys and values of all new tokens.
    """

    allocator: CodedAllocator
    layer_idx: int
    batches: list[RequestBatch]
    exact: list[torch.Tensor]
    new: tuple[torch.Tensor, torch.Tensor]
    handed_out: HandedOut = field(default_factory=HandedOut)

    @classmethod
    def store(cls, allocator: CodedAllocator, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> PagedStates:
        """Store the new tokens `[1, H, tokens, D]` of the pass, and refer to all tokens of its requests."""
        batches = allocator.batches
        exact = [allocator.read_exact(layer_idx, batch) for batch in batches]
        for batch in batches:
            allocator.write(layer_idx, batch, batch.select(keys), batch.select(values))
        return cls(allocator, layer_idx, batches, exact, (keys, values))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of dense states."""
        return self.new[0].dtype

    @property
    def device(self) -> torch.device:
        """Device of the pages."""
        return self.new[0].device

    def lazy(self) -> tuple[LazyKV, LazyKV]:
        """Make lazy keys and values."""
        shapes = self.states_shape("keys"), self.states_shape("values")
        return make_lazy_kv(self, *shapes, self.lazy_length(), self.dtype, self.device)

    def lazy_length(self) -> int:
        """Return the number of tokens of all requests."""
        return sum(int(batch.past.sum()) + batch.tokens.numel() for batch in self.batches)

    def states_shape(self, side: str) -> tuple[int, int, int, int]:
        """Return the shape of the dense `"keys"` or `"values"` of all requests."""
        states = self.new[side == "values"]
        return 1, states.shape[1], self.lazy_length(), states.shape[3]

    def run_plan(self, query: torch.Tensor, num_tokens: int, scale: float | None) -> None:
        """Return `None`: no plan outlives a pass."""

    def on_exact_attention(self, call: AttentionCall) -> None:
        """Do nothing: tokens are stored before attention."""

    def note_dense_read(self, side: str) -> None:
        """Count a dense read, and warn of the first."""
        counters = self.allocator.counters
        if not counters.dense_reads:
            warn_user(f"`compressed_batching`: something other than attention makes {side} dense, which is slow")
        counters.dense_reads += 1

    def to_dense(self, side: str) -> torch.Tensor:
        """Make `"keys"` or `"values"` dense, `[1, H, T, D]`, one request after the other in the order of the pass."""
        found: dict[int, torch.Tensor] = {}
        for batch, exact in zip(self.batches, self.exact, strict=True):
            new = batch.select(self.new[side == "values"])
            for number, states in enumerate(self._dense_past(side, batch, exact)):
                found[int(batch.tokens[number, 0])] = torch.cat((states.to(new.dtype), new[number]), dim=1)
        return torch.cat([found[first] for first in sorted(found)], dim=1)[None]

    def _dense_past(self, side: str, batch: RequestBatch, exact: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the dense states `[H, T, D]` of each request before its new tokens."""
        layout = self.allocator.layout
        num_sinks, num_recent = layout.num_sink_tokens, layout.num_recent_tokens
        is_value = side == "values"
        rows = self.allocator.row_part(self.layer_idx, batch)
        states = exact[:, :, int(is_value)].transpose(1, 2)  # [B, H, S + N, D]
        coded = states[:, :, :0]
        if rows is not None:
            tiles = decode_tiles(rows.gathered(), (side,))
            coded = torch.cat([values if is_value else keys for keys, values, _, _ in tiles], dim=2)
        for number, past in enumerate(batch.past.tolist()):
            own_sinks = min(num_sinks, past)
            own_recent = min(num_recent, past - own_sinks)
            sinks = states[number, :, :own_sinks]
            recent = states[number, :, num_sinks + num_recent - own_recent :]
            own_rows = coded[number, :, num_sinks : past - own_recent].to(states.dtype)
            yield torch.cat((sinks, own_rows, recent), dim=1)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Attend, `[1, H * G, Q, D]`, request by request, so that no mask of all requests is needed."""
        num_heads, num_tokens = self.new[0].shape[1:3]
        # Queries of a single token may have heads and tokens exchanged
        query = call.query.reshape(1, -1, num_tokens, call.query.shape[3])
        output = query.new_empty(*query.shape[:3], self.new[1].shape[3])
        codec = self.allocator.codec_config.codecs[self.layer_idx]
        counters = self.allocator.counters
        for batch, exact in zip(self.batches, self.exact, strict=True):
            own = batch.select(query)
            kernel, is_fallback = "torch", False
            if call.is_plain:
                kernel, is_fallback = choose_kernel(own, shared_formats=codec.shared_formats)
            parts = self._parts(batch, exact)
            result = attend(own, parts, num_heads, call.scale, kernel, call.softcap, call.sinks)
            output[0].transpose(0, 1)[batch.tokens] = result.transpose(1, 2)
            counters.attend_calls += len(own)
            counters.fused_calls += len(own) * (kernel != "torch")
            counters.kernel_fallbacks += len(own) * is_fallback
        return output.reshape(*call.query.shape[:3], -1)

    def _parts(self, batch: RequestBatch, exact: torch.Tensor) -> Iterator[Part]:
        keys, values = self.new
        return self.allocator.parts(self.layer_idx, batch, exact, batch.select(keys), batch.select(values))
