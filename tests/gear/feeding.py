"""Random tokens for a layer of two heads, and attention to them as Transformers calls it."""

import torch
import torch.nn.functional as F

from kvcache_plugins.layers.compressed_layer import CompressedLayer


NUM_HEADS, HEAD_DIM = 2, 32


def states(batch_size, length, dtype=torch.float32, head_dim=HEAD_DIM) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes keys and values."""
    shape = batch_size, NUM_HEADS, length, head_dim
    return torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)


def feed(layer: CompressedLayer, keys, values, padding=None, query=None) -> torch.Tensor:
    """Gives a layer new tokens and attends once, under a mask where more than the future is hidden."""
    count = keys.shape[2]
    lazy = layer.update(keys, values)
    length, mask = lazy[0].shape[2], None
    if padding is not None or 1 < count < length:
        mask = torch.ones(count, length, dtype=torch.bool).tril(length - count)[None, None]
    if padding is not None:
        mask = mask & (torch.arange(length) >= torch.tensor(padding)[:, None])[:, None, None]
    if query is None:
        query = torch.randn(keys.shape[0], 2 * NUM_HEADS, count, keys.shape[3]).to(keys.dtype)
    is_causal = mask is None and count > 1
    return F.scaled_dot_product_attention(query, *lazy, attn_mask=mask, is_causal=is_causal, enable_gqa=True)
