"""Tables of a prompt: they find the layout that the keys have, and give bits by what queries ask for."""

import pytest
import torch

from kvcache_plugins.codecs.prompt_codec import QueryMoments, make_key_format
from kvcache_plugins.formats.positions import Positions
from kvcache_plugins.formats.rotary import candidate_layouts


HEAD_DIM, LENGTH, TOTAL = 32, 400, 10
FREQUENCIES = tuple((100.0 ** -(torch.arange(16) / 16)).tolist())
LAYOUTS = candidate_layouts(FREQUENCIES, HEAD_DIM)


def angles() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Cosines and sines `[1, 1, T, D]` of all layouts."""
    at = Positions().of(LENGTH, torch.device("cpu"))[:, None]
    return [layout.angles(at) for layout in LAYOUTS]


def unlike_channels(batch_size: int = 1) -> torch.Tensor:
    deviations = torch.logspace(-1, 1, HEAD_DIM)[torch.randperm(HEAD_DIM)]
    return torch.randn(batch_size, 2, LENGTH, HEAD_DIM) * deviations + 3 * torch.randn(HEAD_DIM)


@pytest.mark.parametrize("number", range(3), ids=[layout.name for layout in LAYOUTS])
def test_rotary_layout_is_detected(number):
    at = angles()
    keys = LAYOUTS[number].rotate(unlike_channels(), *at[number])
    valid = torch.ones(1, LENGTH, dtype=torch.bool)
    assert make_key_format(keys, valid, None, LAYOUTS, Positions(), TOTAL).rope == LAYOUTS[number]


def test_channels_with_large_queries_get_more_bits():
    keys = torch.randn(1, 1, LENGTH, HEAD_DIM)
    query = torch.randn(1, 4, 50, HEAD_DIM) * 0.01
    query[..., 5], query[..., 21] = 10.0, -8.0
    moments = QueryMoments.of(query, 1, LAYOUTS, None)
    valid = torch.ones(1, LENGTH, dtype=torch.bool)
    none = LAYOUTS[-1:]
    table = make_key_format(keys, valid, QueryMoments.of(query, 1, none, None), none, Positions(), TOTAL)
    assert set(table.order[0, 0, :2].tolist()) == {5, 21}
    assert int(table.widths[0, 0, 0]) == 8
    assert moments.products.shape == (1, 1, 3, HEAD_DIM)


def test_query_moments_average_over_undone_positions():
    """Mean squares of channels against those of queries with the rotary embedding undone position by position."""
    query, layout, number = torch.randn(1, 2, 7, HEAD_DIM) * torch.rand(HEAD_DIM), LAYOUTS[0], 0
    keys, at = unlike_channels(), angles()
    keys = layout.rotate(keys, *at[0])
    valid = torch.ones(1, LENGTH, dtype=torch.bool)
    table = make_key_format(keys, valid, QueryMoments.of(query, 2, LAYOUTS, None), LAYOUTS, Positions(), TOTAL)
    plain = layout.rotate(keys, at[0][0], -at[0][1])
    turned = layout.rotate(query[:, :, :, None], at[number][0][:, :, None], -at[number][1][:, :, None])
    energies = turned.square().mean(dim=(2, 3)) * plain.var(dim=2, unbiased=False)
    in_order = energies.gather(2, table.order.long())
    assert bool((in_order[..., :-1] >= in_order[..., 1:] * 0.99).all())


def test_moments_of_parts_add_up_to_the_whole():
    query = torch.randn(2, 4, 9, HEAD_DIM)
    valid = torch.rand(2, 9) > 0.3
    whole = QueryMoments.of(query, 2, LAYOUTS, valid)
    parts = [QueryMoments.of(query[:, :, part], 2, LAYOUTS, valid[:, part]) for part in (slice(0, 4), slice(4, 9))]
    added = parts[0].plus(parts[1])
    torch.testing.assert_close(added.squares, whole.squares)
    torch.testing.assert_close(added.products, whole.products)
