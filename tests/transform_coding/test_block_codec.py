"""`BlockCodec`: blocks of an engine's cache as bytes, through a loopback of blocks by two specimen adapters."""

import dataclasses

import pytest
import torch
from transformers import DynamicCache

from kvcache_plugins import BlockCodec, create_cache
from kvcache_plugins.files.records import dump_record, load_record
from kvcache_plugins.transform_coding.block_codec import FORMAT, PackedBlock


def make_block(num_tokens=128, dtype=torch.float32, layers=2, heads=3, head_dim=32):
    states = torch.randn(layers, 2, num_tokens, heads, head_dim) * torch.rand(heads, head_dim)
    # Keys have means
    states[:, 0] += 1
    return states.to(dtype)


class TransformSerde:
    """An adapter in the form of LMCache's `Serializer` and `Deserializer`."""

    def __init__(self, config):
        self.codec = BlockCodec(config)

    def to_bytes(self, block):
        return self.codec.pack(block)

    def from_bytes(self, data):
        return self.codec.unpack(data)


class TransformHostPool:
    """A host pool in the form of SGLang's: device pages are packed to host pages by number, and unpacked again."""

    def __init__(self, config, device_pages):
        self.codec = BlockCodec(config)
        self.device_pages = device_pages
        self.held = {}

    def backup_from_device(self, host_indices, device_indices):
        for host, index in zip(host_indices, device_indices, strict=True):
            page = self.device_pages[index]
            self.held[host] = self.codec.pack(page, start=index * page.shape[2])

    def load_to_device(self, host_indices, device_indices):
        for host, index in zip(host_indices, device_indices, strict=True):
            self.device_pages[index].copy_(self.codec.unpack(self.held[host], self.device_pages[index].device))


def blocks_of(cache, length):
    """Blocks `[layers, 2, tokens, heads, head_dim]` of a dense cache of one sequence."""
    states = torch.stack([torch.cat((layer.keys, layer.values)).transpose(1, 2) for layer in cache.layers])
    return list(states.split(length, dim=2))


def cache_of(blocks, config):
    """The dense cache of blocks."""
    cache = DynamicCache(config=config)
    for index, states in enumerate(torch.cat(blocks, dim=2)):
        cache.update(*states.transpose(1, 2)[:, None].contiguous(), index)
    return cache


@pytest.mark.parametrize("adapter", ["lmcache", "sglang"])
@torch.no_grad()
def test_a_model_continues_from_a_loopback_of_blocks(smollm2, licence_ids, adapter):
    model = smollm2[0]
    prompt, rest = licence_ids[:, :512], licence_ids[:, 512:544]
    dense = DynamicCache(config=model.config)
    model(prompt, past_key_values=dense)
    blocks = blocks_of(dense, 256)
    expected = model(rest, past_key_values=dense).logits
    if adapter == "lmcache":
        serde = TransformSerde(model.config)
        data = [serde.to_bytes(block) for block in blocks]
        found = [serde.from_bytes(each) for each in data]
    else:
        pages = torch.stack(blocks)
        pool = TransformHostPool(model.config, pages)
        pool.backup_from_device([7, 3], [0, 1])
        pages.fill_(torch.nan)
        pool.load_to_device([3, 7], [1, 0])
        found, data = list(pages), list(pool.held.values())
    logits = model(rest, past_key_values=cache_of(found, model.config)).logits
    shift = (expected.log_softmax(-1).exp() * (expected.log_softmax(-1) - logits.log_softmax(-1))).sum(-1).mean()
    assert shift < 0.02
    # In percent of the block in 16 bits
    assert sum(map(len, data)) < 0.33 * sum(block.nbytes / 2 for block in blocks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("num_tokens", "start"), [(1, 0), (67, 0), (68, 0), (64, 100), (255, 2), (256, 4096)])
def test_blocks_survive_a_round_trip_through_bytes(dtype, num_tokens, start, tiny_llama):
    block = make_block(num_tokens, dtype)
    codec = BlockCodec(tiny_llama, nbits=6)
    data = codec.pack(block, start)
    found = BlockCodec(tiny_llama, nbits=6).unpack(data)
    assert found.dtype == dtype and found.shape == block.shape and codec.pack(block, start) == data
    num_exact = max(4 - start, 0)
    if num_tokens - num_exact < 64:
        num_exact = num_tokens
    assert torch.equal(found[:, :, :num_exact], block[:, :, :num_exact])
    error = (found.float() - block.float()).square().mean() / block.float().var()
    assert error < 2e-3


@pytest.mark.parametrize(("start", "num_exact"), [(0, 4), (3, 1), (4, 0), (128, 0)])
def test_only_the_first_tokens_of_a_sequence_stay_exact(start, num_exact):
    data = BlockCodec().pack(make_block(100), start)
    packed = load_record(data, FORMAT, PackedBlock)
    assert packed.exact.shape[2] == num_exact
    assert {layer.keys.shape[2] for layer in packed.layers} == {100 - num_exact}


@pytest.mark.parametrize("num_distinct", [2, 3])
def test_tokens_that_repeat_have_no_error_in_common(num_distinct):
    block = make_block(200)[:, :, torch.randint(0, num_distinct, (200,))]
    codec = BlockCodec()
    error = codec.unpack(codec.pack(block, 10)) - block
    # Attention over tokens averages all errors but these
    shared, total = error.mean(dim=2).square().mean(), error.square().mean()
    assert 0 < shared < 0.02 * total


def test_a_token_beyond_the_scales_of_its_block_is_refused():
    # Rows hold multiples of up to 245 of a head's deviation, and one token of 80,000 reaches 283
    block = torch.randn(2, 2, 80_000, 1, 8)
    BlockCodec().pack(block, 10)
    block[1, 1, -1] = 3e4
    with pytest.raises(ValueError, match="a token in layer 1 that is too large for its tables"):
        BlockCodec().pack(block, 10)


@pytest.mark.parametrize("name", ["blocks", "transform", "kivi-2bit"])
def test_no_number_of_float16_becomes_infinite(name):
    block = make_block(200, torch.float16, layers=1)
    block[..., 3] = 65504 * block[..., 3].sign()
    if name == "blocks":
        read = [BlockCodec().unpack(BlockCodec().pack(block))]
    else:
        cache = create_cache(name)
        cache.update(*block[0].transpose(1, 2)[:, None], 0)
        (layer,) = cache.layers
        layer.commit_prompt()
        tiles = [each for *states, _ in layer.iter_dense(None) for each in states]
        read = [layer.to_dense("keys"), layer.to_dense("values"), *tiles]
    assert all(bool(each.isfinite().all()) for each in read)


def test_more_bits_lose_less_and_layers_are_independent():
    block = make_block(200)
    codecs = [BlockCodec(nbits=nbits) for nbits in (2, 4, 6, 8)]
    found = [codec.unpack(codec.pack(block)) for codec in codecs]
    errors = [float((each - block).square().mean()) for each in found]
    assert errors == sorted(errors, reverse=True) and errors[0] > 100 * errors[-1]
    # A layer's bytes do not depend on the others
    assert torch.equal(codecs[1].unpack(codecs[1].pack(block[1:])), found[1][1:])


def test_invalid_blocks_and_bytes_are_refused():
    codec, block = BlockCodec(), make_block(100)
    data = codec.pack(block)
    for wrong, message in (
        (block[0], r"\[layers, 2, tokens, heads, head_dim\] but got \[2, 100, 3, 32\]"),
        (block.long(), "is of torch.int64"),
        (torch.full_like(block, torch.nan), "holds NaN"),
        (block * 1e6, "numbers above 65504"),
    ):
        with pytest.raises(ValueError, match=message):
            codec.pack(wrong)
    with pytest.raises(ValueError, match="`start` has to be an integer of at least 0"):
        codec.pack(block, -1)
    with pytest.raises(ValueError, match="`data` was packed with the options"):
        BlockCodec(nbits=6).unpack(data)
    for size in (0, 7, 100, len(data) - 1):
        with pytest.raises(ValueError, match="`data` .*damaged"):
            codec.unpack(data[:size])
    for place in (len(data) // 2, len(data) - 3):
        flipped = bytearray(data)
        flipped[place] ^= 1
        with pytest.raises(ValueError, match="`data` is damaged"):
            codec.unpack(bytes(flipped))
    with pytest.raises(ValueError, match=r"version 2, but only .* version 1 can be read: pack the block anew"):
        codec.unpack(dump_record(FORMAT._replace(version=2), load_record(data, FORMAT, PackedBlock)))


@pytest.mark.parametrize(
    "change", [{"num_tokens": 2**39}, {"dtype": torch.float16}, {"head_dim": 16}, {"layers": []}], ids=str
)
def test_forged_bytes_are_refused(change):
    codec = BlockCodec()
    packed = load_record(codec.pack(make_block(100)), FORMAT, PackedBlock)
    forged = dump_record(FORMAT, dataclasses.replace(packed, **change))
    with pytest.raises(ValueError, match="`data` is damaged"):
        codec.unpack(forged)
