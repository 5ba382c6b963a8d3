"""From consecutive exact tokens to a compressed block, and how the first prompt is split into exact tokens and whole
groups."""

import dataclasses

import torch

from kvcache_plugins.layers.finite_states import check_finite
from kvcache_plugins.ops.compression_choice import choose_steps
from kvcache_plugins.ops.rotation import rotate

from .config import GEARConfig
from .decomposition import decompose
from .storage import CompressedBlock, ExactPrefix


def compress_tokens(
    keys: torch.Tensor,
    values: torch.Tensor,
    valid: torch.Tensor | None,
    start: int,
    num_chunks: int,
    config: GEARConfig,
    layer_idx: int,
    *,
    is_prompt: bool,
) -> CompressedBlock:
    """
    Compresses consecutive tokens in chunks of equal length.

    Args:
        keys, values (`torch.Tensor` of shape `[batch_size, num_heads, tokens, head_dim]`): exact states.
        valid (`torch.Tensor` of shape `[batch_size, tokens]`, bool, *optional*): tokens that are not padding; all by
            default.
        start (`int`): position of the first token.
        num_chunks (`int`): number of chunks.
        config (`GEARConfig`): options.
        layer_idx (`int`): named in errors.
        is_prompt (`bool`): whether the prompt's ranks apply, or those of decoded tokens.

    Raises:
        ValueError: if states are not finite or exceed float16.
    """
    steps = choose_steps(keys, is_prompt=is_prompt)
    # Kernels notice by themselves what is not finite; then the states are looked at, to say what it was
    if not steps.is_fused:
        check_finite(keys, values, valid, layer_idx)
    valid_chunks = None if valid is None else valid.unflatten(1, (num_chunks, -1))
    sides = (
        (keys, config.key, config.key_grouping(keys.shape[3])),
        (rotate(values) if config.rotate_values else values, config.value, config.value_grouping(values.shape[3])),
    )
    try:
        compressed_keys, compressed_values = (
            decompose(
                states.unflatten(2, (num_chunks, -1)),
                valid_chunks,
                side,
                grouping,
                rank=side.rank if is_prompt else side.decode_rank,
                num_iterations=config.num_iterations,
                recent_ratio=config.low_rank_recent_ratio if is_prompt else 1.0,
                steps=steps,
            )
            for states, side, grouping in sides
        )
        steps.check_range()
    except ValueError as error:
        check_finite(keys, values, valid, layer_idx)
        raise ValueError(f"layer {layer_idx}: {error}") from error
    return CompressedBlock(
        compressed_keys,
        dataclasses.replace(compressed_values, is_rotated=config.rotate_values),
        start=start,
        num_chunks=num_chunks,
        length=keys.shape[2],
        is_fused=steps.is_fused,
    )


def split_first_prompt(
    keys: torch.Tensor,
    values: torch.Tensor,
    padding: list[int] | None,
    config: GEARConfig,
    layer_idx: int,
    left_out: int = 0,
) -> tuple[ExactPrefix | None, list[CompressedBlock]]:
    """
    Splits every item of a left-padded batch into exact first tokens and tokens to compress, and compresses those.

    Items end together, so groups are counted back from the end: a sequence is compressed the same alone and padded.
    Exact are at least the sink tokens: where they stand in the first group, what it stores of them means nothing.

    Args:
        keys, values (`torch.Tensor` of shape `[batch_size, num_heads, tokens, head_dim]`): exact states of the whole
            prompt.
        padding (`list[int]`, *optional*): padding tokens at the start of each item; none by default.
        config (`GEARConfig`): options.
        layer_idx (`int`): named in errors.
        left_out (`int`, *optional*, defaults to 0): tokens at the beginning that are not stored, as they are out of a
            window.

    Returns:
        The exact tokens, if there can be any, and one block or none.
    """
    keys, values = keys[:, :, left_out:], values[:, :, left_out:]
    batch_size, length, device = keys.shape[0], keys.shape[2], keys.device
    num_sinks = [config.num_sink_tokens - max(left_out - pad, 0) for pad in padding or [0] * batch_size]
    padding = [max(pad - left_out, 0) for pad in padding or [0] * batch_size]
    compressed_counts = [config.num_compressible(length - pad) for pad in padding]
    exact_counts = [
        max(length - pad - count, min(sinks, length - pad), 0)
        for pad, count, sinks in zip(padding, compressed_counts, num_sinks, strict=True)
    ]
    start = torch.tensor(padding, device=device)
    positions = torch.arange(length, device=device)
    check_finite(keys, values, positions >= start[:, None], layer_idx)
    blocks = []
    first = length - max(compressed_counts)
    if first < length:
        first_valid = [pad + count for pad, count in zip(padding, exact_counts, strict=True)]
        # With its data even where states have none
        on = torch.device("cpu") if keys.is_meta else device
        valid = torch.arange(first, length, device=on) >= torch.tensor(first_valid, device=on)[:, None]
        states = keys[:, :, first:], values[:, :, first:]
        all_valid = max(first_valid) == first
        blocks.append(
            compress_tokens(
                *states, None if all_valid else valid, left_out + first, 1, config, layer_idx, is_prompt=True
            )
        )
    if left_out and not any(padding) and not any(exact_counts):
        return None, blocks
    num_slots = max(exact_counts)
    slots = (start[:, None] + torch.arange(num_slots, device=device)).clamp(max=length - 1)[:, None, :, None]
    exact_keys, exact_values = (
        states.gather(2, slots.expand(-1, states.shape[1], -1, states.shape[3])) for states in (keys, values)
    )
    is_uniform = left_out == 0 and not any(padding) and min(exact_counts) == num_slots
    count = torch.tensor(exact_counts, device=device)
    return ExactPrefix(exact_keys, exact_values, start=left_out + start, count=count, is_uniform=is_uniform), blocks
