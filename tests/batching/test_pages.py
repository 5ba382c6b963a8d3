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


def make_allocator(codec, num_recent, dtype, num_blocks=40):
    recipe = Recipe({0: codec}, SINKS, num_recent)
    options = {"index": 0, "config": None, "num_key_value_heads": HEADS, "cache_dtype": dtype, "page_size": PAGE}
    allocator = CodedAllocator(recipe, **options, layer_indices=[0], allow_block_sharing=True)
    size = allocator.bytes_per_block
    memory = torch.randint(0, 256, ((num_blocks + 2) * size,), dtype=torch.uint8)
    allocator.register_cache_tensor(size, num_blocks * size, memory, CachePool(num_blocks, 1))
    return allocator


def find_requests(allocator, members):
    """Requests of one pass, given the tokens before it, the new ones and the name of each; they get their blocks."""
    write = []
    for past, new, name in members:
        for _ in range(allocator.needs_new_sectors(name, past, new)):
            allocator.pool.allocate_sector(0)
        allocator.allocate_cache_to_request(name, past, new)
        write += allocator.get_write_indices(name, past, new)
    starts = [0, *itertools.accumulate(new for _, new, _ in members)]
    key_starts = [0, *itertools.accumulate(past + new for past, new, _ in members)]
    return allocator.requests(starts, key_starts, torch.tensor(write))


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
    # Tokens of two requests in every pass: borders of pages, single tokens, a token alone
    names, passes = "ab", [(60, 1), (3, 5), (1, 1), (1, 1), (20, 58), (64, 1), (1, 1)]
    if kernel == "triton":
        # Interpreted, which takes long
        passes = passes[:4]
    held = [[torch.zeros(1, HEADS, 0, head_dim, dtype=dtype) for _ in range(2)] for _ in names]
    for counts in passes:
        new = [[torch.randn(1, HEADS, count, head_dim).to(dtype) for _ in range(2)] for count in counts]
        starts = [0, counts[0], sum(counts)]
        pasts = [own[0].shape[2] for own in held]
        requests = find_requests(allocator, list(zip(pasts, counts, names, strict=True)))
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


def held(allocator, name, past, new):
    """All that a new token of a request attends to, and its pass."""
    (requests,) = find_requests(allocator, [(past, 1, name)])
    parts = allocator.parts(0, requests, allocator.exact(0, requests), *new)
    tiles = ((part.gathered() if isinstance(part, PagedPart) else part).tiles() for part in parts)
    return [tile[side] for tile in itertools.chain(*tiles) for side in range(2)], requests


def make_request(allocator, codec, length):
    keys, values = torch.randn(2, 1, HEADS, length, codec.head_shapes[0][1])
    (requests,) = find_requests(allocator, [(0, length, "a")])
    allocator.write(0, requests, keys, values)
    return keys, values


# Within a page, and at its end, where the fork has no rows to copy
@pytest.mark.parametrize("length", [70, 128])
def test_forks_share_first_tokens_and_whole_pages_alone(length, tiny_llama):
    codec = make_codec(tiny_llama)
    allocator = make_allocator(codec, 8, torch.float32)
    keys, _ = make_request(allocator, codec, length)
    source = allocator.block_table["a"]
    for _ in range(allocator.count_non_shareable_blocks("a", length)):
        allocator.pool.allocate_sector(0)
    allocator.copy_blocks(*allocator.fork_blocks("a", "b", length))
    shared = [own for own, other in zip(source, allocator.block_table["b"], strict=True) if own == other]
    pages = length // PAGE
    assert shared == [*source[: allocator.num_first], *source[allocator.num_lead : allocator.num_lead + pages]]
    new = torch.randn(2, 1, HEADS, 1, keys.shape[3])
    before, requests = held(allocator, "a", length, new)
    allocator.write(0, requests, *new)
    for own, copy in zip(before, held(allocator, "b", length, new)[0], strict=True):
        assert torch.equal(own, copy)
    for name in "ab":
        allocator.free_blocks(name)
    assert allocator.pool.count_free_blocks(0) + allocator.pool.num_free_sectors == 40


def test_a_found_prefix_has_its_first_tokens_and_newest_ones_of_its_rows(tiny_llama):
    codec = make_codec(tiny_llama)
    allocator = make_allocator(codec, 8, torch.float32)
    keys, values = make_request(allocator, codec, 128)
    ids = list(range(130))
    allocator.mark_complete_blocks("a", ids, 2)
    allocator.free_blocks("a")
    matched = allocator.match_prefix_blocks(ids)
    allocator.acquire_prefix_blocks("b", 128, matched)
    new = torch.randn(2, 1, HEADS, 1, keys.shape[3])
    (*_, exact_keys, exact_values), _ = held(allocator, "b", 128, new)
    rows = codec.encode(keys, values, Positions(0, None))
    decoded = codec.decode_keys(rows[0], Positions(0, None)), codec.decode_values(rows[1])
    for own, states, coded in zip((exact_keys, exact_values), (keys, values), decoded, strict=True):
        assert torch.equal(own[:, :, :SINKS], states[:, :, :SINKS])
        torch.testing.assert_close(own[:, :, SINKS:-1], coded[:, :, -8:])
    # The same blocks again, written by another request, are given back for those that are known
    allocator.free_blocks("b")
    make_request(allocator, codec, 128)
    allocator.mark_complete_blocks("a", ids, 2)
    assert allocator.block_table["a"][allocator.num_lead :] == matched
    allocator.free_blocks("a")
    allocator.pool.free_blocks(0, allocator.ledger.evict_cached_blocks())
    assert allocator.pool.count_free_blocks(0) + allocator.pool.num_free_sectors == 40
