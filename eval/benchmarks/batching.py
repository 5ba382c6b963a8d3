"""Decode steps of continuous batching: Transformers' own pages, dense tensors of every request, and coded pages.

On a CPU Transformers copies keys and values of all requests into one tensor, with a mask that separates requests. That
is slower than a dense cache need be. So `dense, by request` attends to contiguous tensors of one request at a time,
and reads a key once for all query heads of its group. Pages hold random bytes, on which no time depends.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.layers.lazy_kv import HandedOut, make_lazy_kv


BY_INDEX, BY_REQUEST = "Transformers", "dense, by request"


class RequestStates:
    """Dense keys and values `[B, H, T, D]` of requests of one length, with the methods that `LazyKV` calls."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.handed_out = HandedOut()
        self._keys, self._values, self.device, self.dtype = keys, values, keys.device, keys.dtype

    def lazy_length(self) -> int:
        """Return the tokens of all requests."""
        return self._keys.shape[0] * self._keys.shape[2]

    def run_plan(self, query: torch.Tensor, num_tokens: int, scale: float | None) -> None:
        """Return `None`: there is no plan."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Attend request by request."""
        batch_size, heads, _, head_dim = self._keys.shape
        query = call.query.reshape(heads, -1, batch_size, head_dim).permute(2, 0, 1, 3)
        outputs = [
            F.scaled_dot_product_attention(own, keys, values, scale=call.scale)
            for own, keys, values in zip(query.split(1), self._keys.split(1), self._values.split(1), strict=True)
        ]
        return torch.cat(outputs).permute(1, 2, 0, 3).reshape(call.query.shape)


def dense_update(context: int) -> Callable[..., Any]:
    """Make a replacement of `PagedAttentionCache.update` that stores a token of every request in dense tensors."""
    length, layers = context + 1, dict[int, torch.Tensor]()

    def update(key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, kwargs: dict[str, Any]) -> Any:
        heads, batch_size, head_dim = key_states.shape[1:]
        if layer_idx not in layers:
            layers[layer_idx] = torch.randn(
                2, batch_size, heads, length, head_dim, dtype=key_states.dtype, device="cpu"
            )
        kwargs["cu_seq_lens_k"], kwargs["max_length_k"] = None, length
        keys, values = layers[layer_idx]
        keys[:, :, -1], values[:, :, -1] = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        shape = 1, heads, batch_size * length, head_dim
        # Attention is all that reads them
        states: Any = RequestStates(keys, values)
        return make_lazy_kv(states, shape, shape, shape[2], keys.dtype, keys.device)

    return update


class BatchedSteps:
    """Decode steps of `num_requests` of `context` tokens each, by Transformers' own classes."""

    def __init__(
        self, network: PreTrainedModel, num_requests: int, context: int, page_size: int, most_tokens: int = 64
    ) -> None:
        # Transformers has no public name for the placeholders that a fresh cache is filled with
        from transformers.generation.continuous_batching.requests import RequestStatus, create_warmup_future_states

        model: Any = network
        self._network, self._context = network, context
        config = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1)
        paging = ContinuousBatchingConfig(
            page_size=page_size,
            num_blocks=num_requests * (context // page_size + 1),
            max_batch_tokens=max(most_tokens, num_requests),
            max_requests_per_batch=num_requests,
        )
        manager = model.init_continuous_batching(generation_config=config, continuous_batching_config=paging)
        processor = manager._create_batch_processor()
        network.__dict__.pop("_cached_continuous_batching_manager", None)
        self.cache: Any = processor.cache
        self._inputs, self._runner = processor.inputs_and_outputs, processor.model_runner
        # Bytes that are small numbers, and any rows
        self.cache.cache_tensor.random_(0, 60)
        states = create_warmup_future_states(num_requests, RequestStatus.DECODING, 1, context, self.cache)
        if len(states) < num_requests:
            raise RuntimeError(f"the cache has room for {len(states)} of {num_requests} requests")
        self._states = states

    def _prepared(self, tokens: Sequence[Sequence[int]], start: int) -> dict[str, Any]:
        """Prepare a pass over as many tokens of every request, from position `start` on."""
        for state, own in zip(self._states, tokens, strict=True):
            state.state.position_offset, state.state.tokens_to_process = start, list(own)
            state.query_length = len(own)
        sizes = sum(map(len, tokens)), len(tokens) * start
        self._inputs.prepare_batch_tensors(self._states, self._runner.logit_processor, False, *sizes, False)
        return self._inputs.get_model_kwargs()

    @torch.inference_mode()
    def step(self, number: int) -> None:
        """Decode a token of every request."""
        data = self._prepared([[number]] * len(self._states), self._context)
        self._runner.compute_batch(self._network, data)

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks that all requests have."""
        allocators = self.cache.cache_allocators.values()
        return sum(each.bytes_per_block * sum(map(len, each.block_table.values())) for each in allocators)
