"""Rules that select tokens, and the copies of keys that score them."""

import pytest
import torch

from kvcache_plugins.infinigen.config import InfiniGenConfig
from kvcache_plugins.infinigen.pool import TokenPool
from kvcache_plugins.infinigen.scoring import Scoring, ScoringCodes, ScoringColumns
from kvcache_plugins.infinigen.selection import always_attended, select_tokens
from kvcache_plugins.layers.lazy_layer import LeftPadding


NOTHING = torch.empty(1, 1, 1, 0)


def store(scoring: Scoring, keys: torch.Tensor, pool: TokenPool | None = None) -> TokenPool:
    """Store keys, which are their own values, in a pool and its scoring data."""
    rows, parts = scoring.encode(keys, keys, keys.shape[2], 0 if pool is None else pool.num_tokens)
    pool = pool or TokenPool(parts)
    scoring.store(rows, *pool.append(parts, scoring.padding.counts), pool)
    return pool


def padding_of(*counts: int) -> LeftPadding:
    padding = LeftPadding()
    padding.set(torch.tensor(counts))
    return padding


def chosen(weights: list[float], *, forced=(), allowed=None, resident=(), num_tokens=None, **options) -> list[int]:
    """Return the slots that one head with these weights selects."""
    count = len(weights)
    selection = select_tokens(
        torch.tensor(weights).log()[None, None, None],
        torch.tensor(resident).log().reshape(1, 1, 1, -1),
        None if allowed is None else torch.tensor(allowed)[None, None],
        torch.tensor([slot in forced for slot in range(count)])[None, None],
        count if num_tokens is None else num_tokens,
        count,
        InfiniGenConfig(**{"max_fetch_ratio": 1.0, **options}),
    )
    return selection.slots[0, 0, : selection.count[0, 0]].tolist()


HALF = {"alpha": float("inf"), "max_fetch_ratio": 0.5}
WEIGHTS = [0.02, 0.4, 0.08, 0.3, 0.15, 0.05]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # One of six tokens weighs a sixth if all weigh the same
        ({"min_weight": 1.0}, [1, 3]),
        ({"min_weight": 0.5}, [1, 3, 4]),
        # 0.15 is 0.98 below the largest score, 0.08 is 1.6
        ({"alpha": 1.0}, [1, 3, 4]),
        ({"alpha": float("inf")}, [1, 3, 4, 2, 5, 0]),
        ({"alpha": float("inf"), "max_fetch_ratio": 0.34}, [1, 3]),
        ({**HALF, "forced": (0,)}, [0, 1, 3]),
        ({"min_weight": 1.0, "forced": (0, 5)}, [5, 0, 1, 3]),
        ({**HALF, "allowed": [True, False, True, True, True, True]}, [3, 4, 2]),
        ({"alpha": float("inf"), "allowed": [False, False, True, True, False, False]}, [3, 2]),
        ({**HALF, "forced": (1,), "allowed": [True, False, True, True, True, True]}, [3, 4, 2]),
        # Tokens of the tail have half of the weight already
        ({"min_weight": 1.0, "resident": [1.0]}, [1]),
        ({**HALF, "num_tokens": 2}, [1]),
    ],
    ids=str,
)
def test_selections_follow_the_rules(options: dict[str, object], expected: list[int]) -> None:
    assert chosen(WEIGHTS, **options) == expected


def test_first_and_newest_attended_tokens_are_always_selected() -> None:
    columns = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 1, 0]]).bool()
    found = always_attended(columns, InfiniGenConfig(sink=2, recent=3))
    assert found.nonzero()[:, 1].tolist() == [1, 2, 5, 6, 7]


def test_sequences_of_a_batch_have_their_own_budget() -> None:
    scores = torch.randn(2, 3, 2, 40, generator=torch.Generator().manual_seed(0))
    allowed = torch.arange(40) >= torch.tensor([0, 30])[:, None, None]
    forced = torch.zeros(1, 1, 40, dtype=torch.bool)
    config = InfiniGenConfig(alpha=float("inf"), max_fetch_ratio=0.2)
    both = select_tokens(scores, torch.empty(2, 3, 2, 0), allowed, forced, torch.tensor([40, 10]), 40, config)
    assert both.count.tolist() == [[8] * 3, [2] * 3]
    assert (both.slots[1, :, :2] >= 30).all()


@pytest.mark.parametrize(("nbits", "limit"), [(2, 0.5), (4, 0.12), (8, 0.008)])
@pytest.mark.parametrize("head_dim", [64, 18])
def test_codes_approximate_scores(nbits: int, limit: float, head_dim: int) -> None:
    """Scores differ by a constant of each query, which drops out of the softmax."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.rand(head_dim, generator=generator) * 4 + 0.1
    keys = torch.randn(2, 3, 150, head_dim, generator=generator) * spread + 10 * spread
    query = torch.randn(2, 3, 4, head_dim, generator=generator) / spread
    scoring, pool = ScoringCodes(InfiniGenConfig(scoring_nbits=nbits), LeftPadding()), None
    for start in range(0, 150, 50):
        pool = store(scoring, keys[:, :, start : start + 50], pool)
    assert pool is not None
    scores, expected = scoring.scores(query, pool), query @ keys.transpose(2, 3)
    assert scores.shape == (2, 3, 4, 150)
    scores, expected = (each - each.mean(dim=3, keepdim=True) for each in (scores, expected))
    assert (scores - expected).norm() / expected.norm() < limit


@pytest.mark.parametrize("nbits", [2, 4, 8])
def test_scores_are_finite_if_a_channel_varies_late(nbits: int) -> None:
    keys = torch.randn(1, 2, 514, 16, generator=torch.Generator().manual_seed(0))
    keys[..., 3] = 20.0 * (torch.arange(514) == 513)
    scoring = ScoringCodes(InfiniGenConfig(scoring_nbits=nbits), LeftPadding())
    pool = store(scoring, keys[:, :, :513])
    store(scoring, keys[:, :, 513:], pool)
    assert scoring.scores(torch.ones(1, 2, 1, 16), pool).isfinite().all()


def test_codes_of_replaced_tokens_are_replaced() -> None:
    keys = torch.randn(1, 2, 52, 16, generator=torch.Generator().manual_seed(0))
    scoring = ScoringCodes(InfiniGenConfig(pool_tokens=50), LeftPadding())
    rows, parts = scoring.encode(keys, keys, 52, 0)
    slots = torch.tensor([[[3, 17], [40, 0]]])
    scoring.store(rows, 50, [slots], TokenPool(parts))
    order = torch.arange(50).repeat(1, 2, 1).scatter(2, slots, torch.tensor([50, 51]).expand(1, 2, 2))
    in_order = keys.gather(2, order[..., None].expand(-1, -1, -1, 16))
    expected, _ = scoring.encode(in_order, in_order, 50, 0)
    assert scoring.rows.keys() == expected.keys() == {"codes", "scale"}
    assert all(torch.equal(scoring.rows[name], expected[name]) for name in expected)


def test_padding_does_not_enter_the_statistics() -> None:
    keys = torch.randn(1, 2, 80, 16, generator=torch.Generator().manual_seed(0))
    padded = torch.cat([torch.full((1, 2, 20, 16), 1e3), keys], dim=2)
    alone, beside = (ScoringCodes(InfiniGenConfig(), each) for each in (LeftPadding(), padding_of(20)))
    alone.encode(keys, keys, 80, 0)
    beside.encode(padded, padded, 100, 0)
    torch.testing.assert_close(beside.fitted, alone.fitted)
    assert beside.fitted.keys() == {"mean", "spread"}


def test_sequences_that_begin_with_padding_alone_are_scored() -> None:
    """A limited pool is full by then, and its statistics are never fitted anew."""
    keys = torch.randn(1, 2, 80, 64, generator=torch.Generator().manual_seed(0))
    query = torch.randn(1, 2, 3, 64, generator=torch.Generator().manual_seed(1))
    scoring = ScoringCodes(InfiniGenConfig(pool_tokens=30), padding_of(30))
    pool = store(scoring, keys, TokenPool((keys, keys), max_tokens=30))
    positions = pool.positions(keys.device)
    assert positions.min() >= 30
    expected = query @ keys.gather(2, positions[..., None].expand(-1, -1, -1, 64)).transpose(2, 3)
    assert (scoring.scores(query, pool) - expected).norm() / expected.norm() < 0.15


@pytest.mark.parametrize("skewing", ["none", "query-svd"])
def test_all_columns_give_exact_scores(skewing: str) -> None:
    """The rotation is orthogonal: queries and keys rotated alike have the same products."""
    generator = torch.Generator().manual_seed(0)
    keys, queries = torch.randn(2, 3, 90, 16, generator=generator), torch.randn(2, 6, 90, 16, generator=generator)
    query = torch.randn(2, 3, 2, 16, generator=generator)
    scoring = ScoringColumns(InfiniGenConfig(partial_ratio=1.0, skewing=skewing), LeftPadding())
    scoring.record_queries(queries, 3, 90)
    pool = store(scoring, keys)
    torch.testing.assert_close(scoring.scores(query, pool), query @ keys.transpose(2, 3), atol=1e-4, rtol=1e-4)


def test_skewing_needs_fewer_columns_for_queries_of_low_rank() -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 2, 200, 32, generator=generator)
    basis = torch.randn(1, 2, 1, 4, 32, generator=generator)
    queries = torch.randn(1, 2, 2, 200, 4, generator=generator) @ basis
    query, expected = queries[:, :, :, -1], queries[:, :, :, -1] @ keys.transpose(2, 3)
    errors = {}
    for each in ("none", "query-svd"):
        scoring = ScoringColumns(InfiniGenConfig(partial_ratio=0.25, skewing=each), LeftPadding())
        scoring.record_queries(queries.flatten(1, 2), 2, 200)
        pool = store(scoring, keys)
        errors[each] = float((scoring.scores(query, pool) - expected).norm() / expected.norm())
    assert errors["query-svd"] < 1e-3 < 0.3 < errors["none"]


@pytest.mark.parametrize(
    ("sizes", "num_resident", "options"),
    [
        ((1, 1, 1, 1), 1, {}),
        ((1, 3, 3, 129), 0, {}),
        ((3, 1, 9, 64), 8, {"min_weight": 2.0}),
        ((2, 2, 4, 1000), 70, {"max_fetch_ratio": 0.01}),
        ((1, 2, 1, 4097), 5, {"min_weight": 0.1, "sink": 0, "recent": 3}),
        ((1, 1, 3, 20), 2, {"sink": 12, "recent": 12}),
        ((1, 1, 2, 63), 1, {"min_weight": 1000.0, "sink": 1, "recent": 1}),
    ],
    ids=str,
)
def test_compiled_selection_equals_pytorch(sizes, num_resident, options, num_threads, monkeypatch) -> None:
    config = InfiniGenConfig(**options)
    scores, resident = 3 * torch.randn(sizes), 3 * torch.randn(*sizes[:3], num_resident)
    num_tokens = sizes[3] + num_resident
    arguments = (
        scores.transpose(1, 2).contiguous().transpose(1, 2),
        resident,
        None,
        None,
        num_tokens,
        num_tokens,
        config,
    )
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "torch")
    expected = select_tokens(*arguments)
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "compiled")
    found = select_tokens(*arguments)
    assert torch.equal(found.count, expected.count)
    assert found.slots.shape == expected.slots.shape
    assert torch.equal(found.slots[found.valid], expected.slots[expected.valid])
