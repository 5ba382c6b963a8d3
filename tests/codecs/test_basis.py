"""Rows in calibrated bases: tokens by themselves, errors where they cost least, and tokens unlike all others."""

import copy

import pytest
import torch

from kvcache_plugins.codecs.basis import basis_for_widths, format_in_basis, karhunen_loeve, round_basis
from kvcache_plugins.codecs.bit_allocation import allocate_widths
from kvcache_plugins.codecs.rows import RowCodec, SharedFormats
from kvcache_plugins.formats.quantizer import DISTORTIONS
from kvcache_plugins.formats.rotary import RotaryLayout
from kvcache_plugins.formats.rows import RowFormat
from kvcache_plugins.kernels.ops import decode_rows, encode_rows


NUM_HEADS, HEAD_DIM = 2, 20


@pytest.fixture(autouse=True, params=["torch", "compiled"])
def kernel(monkeypatch, request):
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", request.param)


def make_states(batch_size: int, length: int) -> torch.Tensor:
    mix = torch.randn(NUM_HEADS, HEAD_DIM, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    mix = mix * torch.logspace(0, -1.5, HEAD_DIM)[:, None]
    return torch.randn(batch_size, NUM_HEADS, length, HEAD_DIM) @ mix + 3


def make_table(total: int, *, is_weighted: bool) -> RowFormat:
    states = make_states(1, 4000)[0].double()
    mean = states.mean(dim=1) if is_weighted else torch.zeros(NUM_HEADS, HEAD_DIM)
    centred = states - mean[:, None]
    unit = torch.eye(HEAD_DIM).expand(NUM_HEADS, -1, -1)
    basis, energies = karhunen_loeve(unit, centred.mT @ centred / centred.shape[1])
    by_block = torch.nn.functional.pad(energies, (0, 4)).unflatten(-1, (3, 8)).sum(dim=-1)
    factors = torch.full((NUM_HEADS, HEAD_DIM), 0.5)
    widths = allocate_widths(by_block[None], total, DISTORTIONS)[0]
    own = round_basis(basis, factors)
    rope = RotaryLayout((), "none", 0, HEAD_DIM) if is_weighted else None
    return format_in_basis(mean.half(), *basis_for_widths(factors, *own, widths), rope)


@pytest.mark.parametrize("is_weighted", [True, False], ids=["keys", "values"])
@pytest.mark.parametrize("total", [3, 7, 12, 24])
def test_encoding_of_a_token_ignores_other_tokens(total, is_weighted):
    table, states = make_table(total, is_weighted=is_weighted), make_states(3, 65)
    rows = encode_rows(states, table)
    assert rows.shape == (3, NUM_HEADS, 65, 1 + total) and rows.dtype == torch.uint8
    assert torch.equal(encode_rows(states[1:2, :, 7:8], table), rows[1:2, :, 7:8])
    torch.testing.assert_close(decode_rows(rows[1:2, :, 7:8], table), decode_rows(rows, table)[1:2, :, 7:8])
    assert decode_rows(rows, table).shape == states.shape


def test_an_outlier_token_is_not_clipped():
    """One component of a key is fifty deviations large: its codes must reach there, all others being small."""
    table = make_table(16, is_weighted=True)
    # The matrix that maps components without scale back
    basis = table.basis
    difference = 50 * (basis.vectors[:, 2:3] * basis.steps[:, 2:3, None]) / basis.factors[:, None]
    states = table.mean[0, :, None] + difference
    decoded = decode_rows(encode_rows(states[None], table), table)[0]
    assert float((decoded - states).norm() / difference.norm()) < 0.15


@pytest.mark.parametrize("total", [8, 12, 24])
def test_components_invert_in_the_rounded_basis(total):
    """Inverts components without codes: states in the span of the kept rows come back."""
    table, weights = make_table(total, is_weighted=True), torch.randn(NUM_HEADS, 30, HEAD_DIM)
    basis, inverse = table.basis._matrices()
    kept = weights[..., : table.num_coefficients]
    scaled = kept @ basis
    once = scaled @ inverse
    twice = once + (scaled - once @ basis) @ inverse
    errors = [float(((each - kept) @ basis).norm() / scaled.norm()) for each in (once, twice)]
    assert errors[0] < 0.02 and errors[1] < 1e-3


def test_copies_share_tables_and_devices_have_their_own():
    keys, values = (make_table(8, is_weighted=is_weighted) for is_weighted in (True, False))
    tables = SharedFormats(keys, values)
    assert copy.deepcopy(tables) is tables and copy.deepcopy(RowCodec(tables)).formats() == (keys, values)
    cpu, meta = torch.device("cpu"), torch.device("meta")
    assert tables.on(cpu) == (keys, values) and tables.on(meta)[0].basis.vectors.is_meta
    assert tables.on(meta)[0] is tables.on(meta)[0]
    rows = encode_rows(torch.zeros(1, NUM_HEADS, 5, HEAD_DIM, device=meta), tables.on(meta)[0])
    assert rows.shape == (1, NUM_HEADS, 5, 9)
    assert decode_rows(rows, tables.on(meta)[0]).shape == (1, NUM_HEADS, 5, HEAD_DIM)
