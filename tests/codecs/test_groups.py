"""Groups: packing is exact, quantization within half a step, outliers exact and none twice, low rank close to the
singular value decomposition, and each part lowers the error of each head and sequence; padding is nothing.
"""

import pytest
import torch

from kvcache_plugins.codecs.groups import SideCodec
from kvcache_plugins.codecs.low_rank import power_iteration
from kvcache_plugins.codecs.outliers import Outliers, select_outliers, sort_into_tiles
from kvcache_plugins.codecs.quantization import SUPPORTED_NBITS, are_in_range, check_range, quantize
from kvcache_plugins.formats.bits import pack, packed_size, unpack
from kvcache_plugins.formats.groups import Grouping, add_outliers, dequantize, expand_groups


LAYOUTS_OF_SCALES = {
    "kcvt-keys": Grouping("channel", None),
    "kivi-keys": Grouping("channel", 8),
    "per-token": Grouping("token", 4),
    "kcvt-values": Grouping("token", None),
}


@pytest.mark.parametrize("nbits", SUPPORTED_NBITS)
@pytest.mark.parametrize("head_dim", [1, 7, 16, 63, 64, 80, 96, 128, 256])
def test_packing_is_exact(nbits, head_dim):
    codes = torch.randint(0, 2**nbits, (2, 3, 5, head_dim), dtype=torch.uint8)
    packed = pack(codes, nbits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (2, 3, 5, packed_size(head_dim, nbits))
    assert torch.equal(unpack(packed, nbits, head_dim), codes)
    assert head_dim % 8 or packed_size(head_dim, nbits) == head_dim * nbits // 8


@pytest.mark.parametrize("nbits", SUPPORTED_NBITS)
@pytest.mark.parametrize("name", LAYOUTS_OF_SCALES)
def test_error_is_at_most_half_a_step(nbits, name):
    grouping = LAYOUTS_OF_SCALES[name]
    states = torch.randn(2, 3, 2, 24, 16) * 3 + 1
    codes, scale, zero = quantize(states, None, nbits, grouping)
    assert scale.dtype == zero.dtype == torch.float16
    step = expand_groups(scale, grouping, states.shape).float()
    error = (dequantize(codes, scale, zero, grouping) - states).abs()
    # Scale and zero are rounded to float16, which moves the ends of the range a little
    assert (error <= 0.5 * step + 2e-3 * states.abs().amax()).all()
    assert codes.max() == 2**nbits - 1
    assert codes.min() == 0


@pytest.mark.parametrize("bad", [1e6, -1e6, float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", LAYOUTS_OF_SCALES)
def test_states_beyond_float16_are_refused(name, masked, bad):
    states = torch.randn(1, 2, 1, 8, 4)
    keep = (torch.arange(8) > 1)[:, None].expand(1, 2, 1, 8, 4) if masked else None
    _, *fitting = quantize(states, keep, 4, LAYOUTS_OF_SCALES[name])
    check_range(are_in_range(*fitting))
    states[0, 1, 0, 5, 2] = bad
    _, *exceeding = quantize(states, keep, 4, LAYOUTS_OF_SCALES[name])
    with pytest.raises(ValueError, match="range of float16"):
        check_range(are_in_range(*fitting), are_in_range(*exceeding))


@pytest.mark.parametrize("nbits", SUPPORTED_NBITS)
def test_spread_errors_of_constants_average_to_zero(nbits):
    """Spreads errors: all tokens would be rounded to the same side, which no average over them mends."""
    constant = torch.randn(2, 2, 1, 1, 64)
    states = constant.expand(-1, -1, 3, 200, -1)
    grouping = Grouping("token", 64)
    codes, scale, zero = quantize(states, None, nbits, grouping, spread_errors=True)
    errors = dequantize(codes, scale, zero, grouping) - states
    # Scales and zeros are of float16
    step, rounding = scale.float().amax(), 1e-3 * constant.abs().max()
    assert errors.abs().max() <= step + rounding
    assert errors.mean(dim=3).abs().max() <= 0.02 * step + rounding
    # Weights that fall with the distance, as attention's do
    weights = torch.linspace(0, 1, 200)[:, None]
    assert ((errors * weights).sum(dim=3) / weights.sum()).abs().max() <= 0.03 * step + rounding


def test_states_that_differ_are_rounded_to_the_nearest():
    states, grouping = torch.randn(2, 3, 2, 100, 32), Grouping("token", 32)
    nearest = quantize(states, None, 3, grouping)
    assert all(map(torch.equal, quantize(states, None, 3, grouping, spread_errors=True), nearest))
    # The second of two heads is constant
    states[:, 1] = states[:, 1, :1, :1]
    codes, nearest = (quantize(states, None, 3, grouping, spread_errors=each)[0] for each in (True, False))
    assert torch.equal(codes[:, ::2], nearest[:, ::2]) and not torch.equal(codes[:, 1], nearest[:, 1])


def test_padding_does_not_change_codes_of_constants():
    alone, grouping = torch.randn(1, 2, 1, 1, 32).repeat(1, 1, 1, 60, 1), Grouping("token", 32)
    padded = torch.cat([1e3 * torch.randn(1, 2, 1, 20, 32), alone], dim=3)
    keep = (torch.arange(80) >= 20)[None, None, None, :, None]
    codes = quantize(torch.where(keep, padded, 0), keep, 3, grouping, spread_errors=True)[0]
    assert torch.equal(codes[:, :, :, 20:], quantize(alone, None, 3, grouping, spread_errors=True)[0])


def test_outlier_counts_are_shares_of_the_filtered_axis():
    # The released code takes the count of keys from the channels: 40 a side of 1000 tokens at 4096 channels, instead
    # of 10
    states = torch.randn(1, 32, 1, 1000, 128)
    outliers, _ = select_outliers(states, None, 0.02, "key")
    assert outliers.tokens.shape == (1, 1, 32 * 20 * 128)
    assert outliers.in_use is None
    of_values, _ = select_outliers(states[:, :, :, :3], None, 0.02, "value")
    assert of_values.tokens.shape == (1, 1, 3 * 2 * round(0.01 * 4096))


def test_key_outliers_are_largest_and_smallest_of_each_channel():
    states = torch.randn(2, 2, 3, 50, 8)
    outliers, keep = select_outliers(states, None, 0.08, "key")
    indices = outliers.tokens.unflatten(2, (2, -1, 8)).transpose(1, 2)
    assert torch.equal(keep, torch.ones_like(states).scatter(3, indices, 0).bool())
    chosen = states.gather(3, indices).sort(dim=3).values
    ordered = states.sort(dim=3).values
    assert torch.equal(chosen, torch.cat([ordered[:, :, :, :2], ordered[:, :, :, -2:]], dim=3))


def test_value_outliers_are_chosen_over_all_heads():
    states = torch.zeros(1, 2, 1, 4, 50)
    states[:, 1, :, 2, 7] = 5
    states[:, 0, :, 2, 3] = -5
    outliers, keep = select_outliers(states, None, 0.02, "value")
    assert not keep[0, 1, 0, 2, 7]
    assert not keep[0, 0, 0, 2, 3]
    assert keep[:, :, :, 2].sum() == 98
    places = (outliers.heads * 50 + outliers.channels).view(4, 2)
    assert sorted(places[2].tolist()) == [3, 57]


def test_equal_values_yield_distinct_outlier_positions():
    tokens = select_outliers(torch.zeros(1, 1, 1, 100, 2), None, 0.5, "key")[0].tokens.view(50, 2)
    for channel in range(2):
        assert tokens[:, channel].unique().numel() == 50


def test_short_sequence_of_a_padded_batch_keeps_its_own_count():
    states = torch.randn(2, 2, 1, 400, 4)
    valid = torch.ones(2, 1, 400, dtype=torch.bool)
    valid[1, 0, :300] = False
    outliers, _ = select_outliers(states, valid, 0.02, "key")
    alone = select_outliers(states[1:, :, :, 300:], None, 0.02, "key")[0].tokens
    # Counts over two heads of four channels
    assert outliers.in_use.sum(dim=(1, 2)).tolist() == [8 * 8, 2 * 8]
    assert torch.equal(outliers.tokens[1][outliers.in_use[1]], alone.flatten() + 300)


@pytest.mark.parametrize("head_dim", [20, 64, 512, 600])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_stored_outliers_are_restored_in_place(head_dim, length):
    batch_size, num_heads, num_chunks = 2, 3, 2
    shape = (batch_size, num_heads, num_chunks, length, head_dim)
    dense = torch.where(torch.rand(shape) < 0.02, torch.randn(shape), 0)
    # Every sequence's list is as long as the longest, in random order, with unused entries among the others
    rows = dense.transpose(1, 2).flatten(2)
    order = torch.rand(rows.shape).masked_fill(rows != 0, 2).argsort(dim=2, descending=True)
    flat = order[..., : int((rows != 0).sum(2).max())]
    flat = flat[..., torch.randperm(flat.shape[2])]
    values = rows.gather(2, flat)
    places = Outliers(
        heads=flat // (length * head_dim),
        tokens=flat // head_dim % length,
        channels=flat % head_dim,
        in_use=values != 0,
    )
    stored = sort_into_tiles(places, torch.where(values == 0, 7, values), num_heads, length, head_dim)
    assert stored[0].dtype == (torch.int32 if head_dim > 512 else torch.int16)
    for tokens in (slice(0, length), slice(length // 3, length), slice(length // 2, length // 2 + 1)):
        states = torch.zeros(shape)[:, :, :, tokens].contiguous()
        add_outliers(states, *stored, tokens)
        assert torch.equal(states, dense[:, :, :, tokens])


def test_power_iteration_is_near_the_best_low_rank():
    # Singular values that fall off, as a residual's do
    left, _ = torch.linalg.qr(torch.randn(4, 256, 32))
    right, _ = torch.linalg.qr(torch.randn(4, 32, 32))
    matrix = left * (0.8 ** torch.arange(32)) @ right
    a, b = power_iteration(matrix, 4, 3)
    error = (matrix - a @ b.transpose(-1, -2)).norm(dim=(-2, -1))
    best = torch.linalg.svdvals(matrix)[:, 4:].norm(dim=-1)
    assert (error >= best * 0.9999).all()
    assert error.mean() <= 1.05 * best.mean()


def test_low_rank_ignores_zero_rows_and_other_sequences():
    matrix = torch.randn(2, 40, 16)
    padded = torch.cat([torch.zeros(2, 9, 16), matrix], dim=1)
    a, b = power_iteration(matrix, 3, 3)
    padded_a, padded_b = power_iteration(padded, 3, 3)
    assert torch.equal(padded_a[:, :9], torch.zeros(2, 9, 3))
    assert torch.allclose(padded_a[:, 9:] @ padded_b.transpose(-1, -2), a @ b.transpose(-1, -2), atol=1e-5)
    alone_a, alone_b = power_iteration(matrix[1:], 3, 3)
    assert torch.allclose(alone_a @ alone_b.transpose(-1, -2), (a @ b.transpose(-1, -2))[1:], atol=1e-5)


def test_low_rank_of_zero_and_huge_residuals_is_finite():
    for matrix in (torch.zeros(1, 8, 4), torch.full((1, 8, 4), 1e15)):
        a, b = power_iteration(matrix, 2, 3)
        assert a.isfinite().all()
        assert b.isfinite().all()


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
def test_low_rank_and_outliers_each_lower_every_error(side, backbone, nbits):
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


@pytest.mark.parametrize("tokens", [slice(0, 32), slice(64, 96), slice(0, 96)])
def test_dequantized_tiles_equal_slices_of_the_whole(tokens):
    states = realistic_states(2, 2, 1, 96, 32)
    compressed = compress(side_codec("key", "kivi", sparsity=0.1), states)
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
        {"sparsity": 0.1, "rank": 3, "decode_rank": 0},
        {"sparsity": 0.0, "nbits": 3, "is_rotated": True},
    )
]


def shapes_of(states):
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in states.named_tensors()}


# A prompt is one chunk
@pytest.mark.parametrize(("is_prompt", "num_chunks", "length"), [(True, 1, 96), (False, 1, 96), (False, 3, 64)])
@pytest.mark.parametrize(("side", "backbone", "options"), LAYOUTS)
def test_chunks_have_equal_shapes_with_data_without_and_from_files(
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
def test_non_finite_states_are_refused_except_in_padding(side, backbone, sparsity, is_padded, bad):
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
