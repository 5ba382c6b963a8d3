"""Attention over coded pages is over what was written to them: rows decoded, first and newest tokens exact."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from transformers.generation.continuous_batching.cache_allocators import CachePool

from kvcache_plugins.batching.context import CompressedBatching, PagedStates, own_states
from kvcache_plugins.batching.pages import CodedAllocator, Recipe
from kvcache_plugins.codecs.codec import Positions
from kvcache_plugins.codecs.parts import PagedPart
from kvcache_plugins.codecs.rows import RowCodec, SharedTables
from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.registry import create_cache


HEADS, GROUPS, PAGE, SINKS = 2, 2, 64, 4


def make_codec(model):
    """Tables of a random prompt."""
    cache = create_cache("gear-t25", model)
    with torch.no_grad():
        model(torch.randint(3, 97, (1, 120)), past_key_values=cache)
    return RowCodec(SharedTables(*cache.layers[0].codec.tables()))


def make_allocator(codec, num_recent, dtype, num_blocks=9):
    recipe = Recipe({0: codec}, SINKS, num_recent)
    options = {"index": 0, "config": None, "num_key_value_heads": HEADS, "cache_dtype": dtype, "page_size": PAGE}
    allocator = CodedAllocator(recipe, **options, layer_indices=[0], allow_block_sharing=True)
    size = allocator.bytes_per_block
    memory = torch.randint(0, 256, ((num_blocks + 2) * size,), dtype=torch.uint8)
    allocator.register_cache_tensor(size, num_blocks * size, memory, CachePool(num_blocks, 1))
    return allocator


def find_requests(allocator, members):
    """Requests of one pass, given the tokens before it, the new ones and the blocks of each."""
    stride = allocator.block_physical_stride
    places = [torch.tensor(blocks)[torch.arange(past + new) // PAGE] * stride for past, new, blocks in members]
    starts = [0, *itertools.accumulate(new for _, new, _ in members)]
    key_starts = [0, *itertools.accumulate(past + new for past, new, _ in members)]
    write = [own[past:] for own, (past, _, _) in zip(places, members, strict=True)]
    return allocator.requests(starts, key_starts, torch.cat(places), torch.cat(write))


def expected_states(codec, keys, values, past, num_recent):
    """Keys and values as a pass of new tokens behind `past` others has them."""
    rows = codec.encode(keys, values, Positions(0, None))
    found = codec.decode_keys(rows[0], Positions(0, None)), codec.decode_values(rows[1])
    exact = torch.arange(keys.shape[2])
    exact = (exact < SINKS) | (exact >= past - num_recent)
    return [torch.where(exact[:, None], own, coded) for own, coded in zip((keys, values), found, strict=True)]


@pytest.mark.each_value
@pytest.mark.parametrize("kernel", ["torch", "auto", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_recent", [0, 8])
@torch.no_grad()
def test_attention_is_over_what_was_written(num_recent, dtype, kernel, tiny_llama, monkeypatch):
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", kernel)
    codec = make_codec(tiny_llama)
    allocator, head_dim = make_allocator(codec, num_recent, dtype), codec.head_shapes[0][1]
    batching = CompressedBatching(allocator.recipe)
    # Blocks of two requests, and the tokens of each in every pass: borders of pages, single tokens, a token alone
    blocks, passes = ([5, 2, 8], [3, 7]), [(60, 1), (3, 5), (1, 1), (1, 1), (20, 58), (64, 1), (1, 1)]
    if kernel == "triton":
        # Interpreted, which takes long
        passes = passes[:4]
    held = [[torch.zeros(1, HEADS, 0, head_dim, dtype=dtype) for _ in range(2)] for _ in blocks]
    for counts in passes:
        new = [[torch.randn(1, HEADS, count, head_dim).to(dtype) for _ in range(2)] for count in counts]
        starts = [0, counts[0], sum(counts)]
        pasts = [own[0].shape[2] for own in held]
        requests = find_requests(allocator, list(zip(pasts, counts, blocks, strict=True)))
        joined = [torch.cat([states[side] for states in new], dim=2) for side in range(2)]
        exact = [allocator.exact(0, each) for each in requests]
        for each in requests:
            allocator.write(0, each, *own_states(each, *joined))
        states = PagedStates(batching, allocator, 0, requests, exact, (joined[0], joined[1]))
        query = torch.randn(1, HEADS * GROUPS, sum(counts), head_dim).to(dtype)
        output = states.attend(AttentionCall(query))
        dense = [states.materialize(side) for side in ("keys", "values")]
        position = 0
        for number, (past, count) in enumerate(zip(pasts, counts, strict=True)):
            held[number] = [torch.cat(each, dim=2) for each in zip(held[number], new[number], strict=True)]
            expected = expected_states(codec, *(each.float() for each in held[number]), past, num_recent)
            for own, known in zip(dense, expected, strict=True):
                own = own[:, :, position : position + past + count]
                torch.testing.assert_close(own, known.to(dtype), atol=1e-5, rtol=0.02)
            position += past + count
            tokens = slice(starts[number], starts[number + 1])
            mask = torch.ones(count, past + count, dtype=torch.bool).tril(past)
            wanted = F.scaled_dot_product_attention(
                query[:, :, tokens].float(), *expected, attn_mask=mask, enable_gqa=True
            )
            limit = 1e-4 if dtype == torch.float32 else 0.02
            assert float((output[:, :, tokens].float() - wanted).abs().max()) < limit
    assert batching.stats()["attend_calls"] == len(passes) * 2
    assert (batching.stats()["fused_calls"] > 0) == (kernel != "torch")


def test_copied_blocks_are_whole(tiny_llama):
    codec = make_codec(tiny_llama)
    allocator = make_allocator(codec, 8, torch.float32)
    keys, values = torch.randn(2, 1, HEADS, 70, codec.head_shapes[0][1])
    (requests,) = find_requests(allocator, [(0, 70, [1, 2])])
    allocator.write(0, requests, keys, values)
    allocator.copy_blocks([1, 2], [6, 4])
    new = torch.randn(2, 1, HEADS, 1, keys.shape[3])

    def held(blocks):
        (requests,) = find_requests(allocator, [(70, 1, blocks)])
        parts = allocator.parts(0, requests, allocator.exact(0, requests), *new)
        return [
            tile[side]
            for part in parts
            for tile in (part.gathered() if isinstance(part, PagedPart) else part).tiles()
            for side in range(2)
        ]

    for own, copy in zip(held([1, 2]), held([6, 4]), strict=True):
        assert torch.equal(own, copy)
