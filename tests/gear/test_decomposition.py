"""Each part of the decomposition lowers the error of each head and item; outliers are exact; padding is nothing."""

import pytest
import torch

from kvcache_plugins.gear.config import SideConfig
from kvcache_plugins.gear.decomposition import decompose
from kvcache_plugins.ops.quantization import Grouping


def side_config(side, nbits=2, sparsity=0.02, rank=4):
    return SideConfig(side=side, nbits=nbits, backbone="kivi", sparsity=sparsity, rank=rank, decode_rank=rank)


def realistic_states(*shape):
    """Channels of different offset and size, some directions that many tokens share, and a few large values."""
    states = torch.randn(shape) * torch.rand(shape[-1]) * 2 + torch.randn(shape[-1])
    states += torch.randn(*shape[:-1], 2) @ torch.randn(2, shape[-1])
    return torch.where(torch.rand(shape) < 0.01, states * 6, states)


def reconstruct(states, **kwargs):
    valid = kwargs.pop("valid", None)
    config, grouping = kwargs.pop("config"), kwargs.pop("grouping")
    compressed = decompose(states, valid, config, grouping, config.rank, 3, **kwargs)
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
        config = side_config(side, nbits=nbits, sparsity=sparsity, rank=rank)
        _, dense = reconstruct(states, config=config, grouping=GROUPINGS[side, backbone])
        errors.append((dense - states).norm(dim=(-2, -1)))
    assert (errors[1] < errors[0]).all()
    assert (errors[2] < errors[1]).all()


@pytest.mark.parametrize("side", ["key", "value"])
def test_outliers_are_exact(side):
    states = realistic_states(2, 2, 2, 64, 32)
    states[:, 1, :, 10, 3] = 50
    config = side_config(side, sparsity=0.05)
    _, dense = reconstruct(states, config=config, grouping=GROUPINGS[side, "per-token"])
    assert torch.allclose(dense[:, 1, :, 10, 3], torch.tensor(50.0), atol=0.05)


@pytest.mark.parametrize(("side", "backbone"), GROUPINGS)
@pytest.mark.parametrize("recent_ratio", [1.0, 0.5])
def test_padding_changes_nothing(side, backbone, recent_ratio):
    states = realistic_states(1, 2, 1, 96, 32)
    padded = torch.cat([torch.full((1, 2, 1, 160, 32), 1e4), states], dim=3)
    valid = torch.arange(256)[None, None] >= 160
    other = realistic_states(1, 2, 1, 256, 32)
    config = side_config(side, sparsity=0.05)
    kwargs = {"config": config, "grouping": GROUPINGS[side, backbone], "recent_ratio": recent_ratio}
    _, alone = reconstruct(states, **kwargs)
    _, batch = reconstruct(torch.cat([other, padded]), valid=torch.cat([torch.ones_like(valid), valid]), **kwargs)
    assert torch.allclose(batch[1:, :, :, 160:], alone, atol=1e-3)
    # The result of the whole item is not touched by what the other row holds, to the last bit
    _, batch_with_zeros = reconstruct(
        torch.cat([other, torch.zeros_like(padded)]), valid=torch.cat([torch.ones_like(valid), valid]), **kwargs
    )
    assert torch.equal(batch[0], batch_with_zeros[0])


def test_low_rank_of_the_most_recent_tokens_only():
    states = realistic_states(1, 2, 1, 100, 32)
    config = side_config("key", sparsity=0, rank=4)
    compressed, dense = reconstruct(states, config=config, grouping=Grouping("channel", None), recent_ratio=0.3)
    plain = side_config("key", sparsity=0, rank=0)
    _, backbone = reconstruct(states, config=plain, grouping=Grouping("channel", None))
    assert compressed.low_rank_a.shape == (1, 2, 1, 30, 4)
    assert torch.equal(dense[:, :, :, :70], backbone[:, :, :, :70])
    assert (dense[:, :, :, 70:] - states[:, :, :, 70:]).norm() < (backbone[:, :, :, 70:] - states[:, :, :, 70:]).norm()


@pytest.mark.parametrize("tokens", [slice(0, 32), slice(64, 96), slice(0, 96)])
def test_tiles_are_parts_of_the_whole(tokens):
    states = realistic_states(2, 2, 1, 96, 32)
    config = side_config("key", sparsity=0.1)
    compressed = decompose(states, None, config, Grouping("channel", 32), 4, 3, recent_ratio=0.7)
    whole = compressed.dequantize_tile(slice(0, 1), slice(0, 96))
    assert torch.allclose(compressed.dequantize_tile(slice(0, 1), tokens), whole[:, :, tokens], atol=1e-6)


@pytest.mark.parametrize("side", ["key", "value"])
def test_constant_and_zero_states(side):
    for value in (0.0, 1.5):
        states = torch.full((1, 2, 1, 64, 16), value)
        config = side_config(side, sparsity=0.2)
        _, dense = reconstruct(states, config=config, grouping=GROUPINGS[side, "per-token"])
        assert torch.allclose(dense, states, atol=1e-3)


def test_metadata_is_stored_in_16_bits_and_codes_in_bytes():
    compressed = decompose(realistic_states(1, 2, 1, 64, 16), None, side_config("key"), Grouping("channel", 32), 4, 3)
    dtypes = {name: tensor.dtype for name, tensor in compressed.named_tensors()}
    assert dtypes.pop("codes") == torch.uint8
    assert dtypes.pop("outlier_indices") == torch.int16
    assert dtypes.pop("outlier_offsets") == torch.int32
    assert set(dtypes.values()) == {torch.float16}
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for _, tensor in compressed.named_tensors())
