"""Each part of a codec lowers the error of each head and sequence; outliers are exact; padding is nothing."""

import pytest
import torch

from kvcache_plugins.codecs.groups import SideCodec
from kvcache_plugins.codecs.quantization import Grouping


def side_codec(side, backbone="per-token", nbits=2, sparsity=0.02, rank=4, head_dim=32, **options):
    options = {"decode_rank": rank, "num_iterations": 3, **options}
    grouping = GROUPINGS[side, backbone]
    return SideCodec(
        side=side, head_dim=head_dim, nbits=nbits, grouping=grouping, sparsity=sparsity, rank=rank, **options
    )


def realistic_states(*shape):
    """Channels of different offset and size, some directions that many tokens share, and a few large values."""
    states = torch.randn(shape) * torch.rand(shape[-1]) * 2 + torch.randn(shape[-1])
    states += torch.randn(*shape[:-1], 2) @ torch.randn(2, shape[-1])
    return torch.where(torch.rand(shape) < 0.01, states * 6, states)


def compress(codec, states, valid=None):
    compressed, fits = codec.encode(states, valid, is_prompt=True)
    assert fits
    return compressed


def reconstruct(codec, states, valid=None):
    compressed = compress(codec, states, valid)
    dense = compressed.dequantize_tile(slice(0, states.shape[2]), slice(0, states.shape[3]))
    return compressed, dense.unflatten(2, states.shape[2:4])


GROUPINGS = {
    ("key", "kcvt"): Grouping("channel", None),
    ("key", "kivi"): Grouping("channel", 32),
    ("key", "per-token"): Grouping("token", 16),
    ("value", "kcvt"): Grouping("token", None),
    ("value", "per-token"): Grouping("token", 16),
}


@pytest.mark.parametrize("nbits", [2, 3, 4, 8])
@pytest.mark.parametrize(("side", "backbone"), GROUPINGS)
def test_every_part_lowers_the_error_of_every_head_and_item(side, backbone, nbits):
    states = realistic_states(3, 4, 1, 256, 32)
    errors = []
    for sparsity, rank in ((0, 0), (0, 4), (0.05, 4)):
        _, dense = reconstruct(side_codec(side, backbone, nbits, sparsity, rank), states)
        errors.append((dense - states).norm(dim=(-2, -1)))
    assert (errors[1] < errors[0]).all()
    assert (errors[2] < errors[1]).all()


@pytest.mark.parametrize("side", ["key", "value"])
def test_outliers_are_exact(side):
    states = realistic_states(2, 2, 2, 64, 32)
    states[:, 1, :, 10, 3] = 50
    _, dense = reconstruct(side_codec(side, sparsity=0.05), states)
    assert torch.allclose(dense[:, 1, :, 10, 3], torch.tensor(50.0), atol=0.05)


def test_low_rank_of_the_most_recent_tokens_only():
    states = realistic_states(1, 2, 1, 100, 32)
    compressed, dense = reconstruct(side_codec("key", "kcvt", sparsity=0, rank=4, recent_ratio=0.3), states)
    _, backbone = reconstruct(side_codec("key", "kcvt", sparsity=0, rank=0), states)
    assert compressed.low_rank_a.shape == (1, 2, 1, 30, 4)
    assert torch.equal(dense[:, :, :, :70], backbone[:, :, :, :70])
    assert (dense[:, :, :, 70:] - states[:, :, :, 70:]).norm() < (backbone[:, :, :, 70:] - states[:, :, :, 70:]).norm()


@pytest.mark.parametrize("tokens", [slice(0, 32), slice(64, 96), slice(0, 96)])
def test_tiles_are_parts_of_the_whole(tokens):
    states = realistic_states(2, 2, 1, 96, 32)
    compressed = compress(side_codec("key", "kivi", sparsity=0.1, recent_ratio=0.7), states)
    whole = compressed.dequantize_tile(slice(0, 1), slice(0, 96))
    assert torch.allclose(compressed.dequantize_tile(slice(0, 1), tokens), whole[:, :, tokens], atol=1e-6)


def test_metadata_is_stored_in_16_bits_and_codes_in_bytes():
    compressed = compress(side_codec("key", "kivi", head_dim=16), realistic_states(1, 2, 1, 64, 16))
    dtypes = {name: tensor.dtype for name, tensor in compressed.named_tensors()}
    assert dtypes.pop("codes") == torch.uint8
    assert dtypes.pop("outlier_indices") == torch.int16
    assert dtypes.pop("outlier_offsets") == torch.int32
    assert set(dtypes.values()) == {torch.float16}
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for _, tensor in compressed.named_tensors())


LAYOUTS = [
    (side, backbone, options)
    for side, backbone in GROUPINGS
    for options in (
        {},
        {"sparsity": 0.0, "rank": 0, "decode_rank": 0},
        {"sparsity": 0.1, "rank": 3, "decode_rank": 0, "recent_ratio": 0.4},
        {"sparsity": 0.0, "nbits": 3, "is_rotated": True},
    )
]


def shapes_of(states):
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in states.named_tensors()}


# A prompt is one chunk
@pytest.mark.parametrize(("is_prompt", "num_chunks", "length"), [(True, 1, 96), (False, 1, 96), (False, 3, 64)])
@pytest.mark.parametrize(("side", "backbone", "options"), LAYOUTS)
def test_one_description_for_states_with_and_without_data_and_from_a_file(
    side, backbone, options, num_chunks, length, is_prompt
):
    codec = side_codec(side, backbone, **options)
    states = realistic_states(2, 3, num_chunks, length, 32)
    valid = torch.ones(2, num_chunks, length, dtype=torch.bool)
    valid[1, 0, :30] = False
    for given in (None, valid, valid[1:].expand(2, -1, -1)):
        stored, fits = codec.encode(states, given, is_prompt=is_prompt)
        assert fits
        predicted, _ = codec.encode(states.to("meta"), given, is_prompt=is_prompt)
        assert shapes_of(predicted) == shapes_of(stored)
        tensors = dict(stored.named_tensors())
        read = codec.read("file", tensors, 2, 3, length)
        assert all(tensor is tensors[name] for name, tensor in read.named_tensors())
        assert read.dequantize_tile(slice(0, 1), slice(0, 32)).equal(stored.dequantize_tile(slice(0, 1), slice(0, 32)))
    if not is_prompt:
        assert codec.is_of_decoded(codec.encode(states)[0])


def test_a_partial_low_rank_is_not_taken_for_one_of_decoded_tokens():
    codec = side_codec("key", "kivi", recent_ratio=0.5)
    assert not codec.is_of_decoded(compress(codec, realistic_states(1, 2, 1, 64, 32)))


def test_low_rank_that_exceeds_float16_is_refused():
    states = realistic_states(1, 1, 1, 64, 16)
    # Codes stand for -6e4, -2e4, 2e4 and 6e4
    states[..., 3] = 3e3
    states[..., :2, 3] = torch.tensor([-6e4, 6e4])
    codec = side_codec("key", "kcvt", sparsity=0, rank=2, head_dim=16, num_iterations=1)
    _, fits = codec.encode(states)
    assert not fits
    assert side_codec("key", "kcvt", sparsity=0, rank=0, head_dim=16).encode(states)[1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("sparsity", [0.0, 0.1])
@pytest.mark.parametrize(("side", "backbone"), GROUPINGS)
def test_what_is_not_finite_is_told_but_for_padding(side, backbone, sparsity, is_padded, bad):
    states = realistic_states(1, 2, 1, 64, 32)
    valid = (torch.arange(64) >= 10)[None, None] if is_padded else None
    codec = side_codec(side, backbone, sparsity=sparsity, rank=2)
    for count in (1, 30):
        spoiled = states.clone()
        spoiled[0, 1, 0, 20 : 20 + count, 7] = bad
        assert not codec.encode(spoiled, valid)[1]
    if is_padded:
        states[:, :, :, :10] = bad
        assert codec.encode(states, valid)[1]
