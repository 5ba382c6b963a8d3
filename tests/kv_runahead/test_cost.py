"""The cost model fits what follows its formula, counts what a model multiplies, and pipelines as a chain does."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING

from kvcache_plugins.eval.runahead.tsp import predict_tsp_ttft
from kvcache_plugins.kv_runahead.planner import (
    RECTANGLE,
    TRIANGLE,
    CostModel,
    Link,
    Timing,
    bytes_of_token,
    predict_ttft,
    predict_ttfts,
)


COST = CostModel(fixed=0.01, per_token=1e-4, per_pair=2e-8, triangle=0.6, projection_share=0.2)
SLICES = [(256, 0), (1024, 0), (4096, 0), (512, 512), (1024, 3072), (300, 9000)]


def timings_of(cost: CostModel, slices: list[tuple[int, int]]) -> list[Timing]:
    return [Timing(length=length, prefix=prefix, seconds=cost.seconds(length, prefix)) for length, prefix in slices]


def assert_same(fitted: CostModel, expected: CostModel) -> None:
    for name in ("fixed", "per_token", "per_pair", "triangle"):
        assert getattr(fitted, name) == pytest.approx(getattr(expected, name), rel=1e-6, abs=1e-15), name


def test_fit_finds_what_timings_follow() -> None:
    assert_same(CostModel.fit(timings_of(COST, SLICES)), COST)
    assert_same(CostModel.fit(timings_of(COST, SLICES), triangle=0.6), COST)
    assert_same(CostModel.fit(timings_of(COST, SLICES[:3]), triangle=0.6), COST)


def test_two_timings_of_one_process_are_enough() -> None:
    """The paper's: 8k and 16k."""
    cost = CostModel(per_token=0.317 / 4096, per_pair=0.333 / 4096**2, triangle=RECTANGLE)
    two = timings_of(cost, [(8192, 0), (16384, 0)])
    assert_same(CostModel.fit(two, triangle=RECTANGLE), cost)
    # Measured again, they are no more than two
    assert_same(CostModel.fit(two * 3, triangle=RECTANGLE), cost)


def test_what_would_be_negative_is_zero() -> None:
    """Seconds that grow more slowly than lengths: no attention shows, and nothing negative stands for it."""
    slow = [Timing(length=length, seconds=seconds) for length, seconds in ((100, 1.0), (200, 1.5), (400, 2.3))]
    fitted = CostModel.fit(slow, triangle=TRIANGLE)
    assert fitted.per_pair == 0
    assert fitted.per_token > 0 and fitted.fixed > 0


def test_fit_bears_noise() -> None:
    generator = np.random.default_rng(0)
    noisy = [
        Timing(length=each.length, prefix=each.prefix, seconds=each.seconds * generator.uniform(0.98, 1.02))
        for each in timings_of(COST, SLICES * 3)
    ]
    fitted = CostModel.fit(noisy)
    for length, prefix in [*SLICES, (2048, 2048)]:
        assert fitted.seconds(length, prefix) == pytest.approx(COST.seconds(length, prefix), rel=0.03)


@pytest.mark.parametrize(
    ("slices", "triangle", "message"),
    [
        ([], 1.0, "slices of two lengths at least, but got \\[\\]"),
        ([(64, 0), (64, 64)], 1.0, "slices of two lengths at least"),
        (SLICES[:3], None, "without `triangle`, `timings` has to hold four different slices, with and without"),
        (SLICES[3:], None, "without `triangle`"),
        (SLICES[2:5], None, "without `triangle`"),
    ],
)
def test_too_few_timings_are_refused(slices: list[tuple[int, int]], triangle: float | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CostModel.fit(timings_of(COST, slices), triangle=triangle)


def test_timings_that_tell_nothing_are_refused() -> None:
    same = [Timing(length=length, prefix=prefix, seconds=1.0) for length, prefix in SLICES]
    with pytest.raises(ValueError, match="do not grow with the length"):
        CostModel.fit(same, triangle=0.5)
    with pytest.raises(ValueError, match="do not tell `triangle`"):
        CostModel.fit(same)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Timing(length=0, seconds=1.0), "`length` has to be an integer of at least 1 but got 0"),
        (lambda: Timing(length=1, prefix=-1, seconds=1.0), "`prefix` has to be an integer of at least 0"),
        (lambda: Timing(length=1, seconds=0.0), "`seconds` has to be a number above 0 but got 0.0"),
        (lambda: Timing(length=1, seconds=float("nan")), "`seconds` has to be a number"),
        (lambda: Link(bytes_per_second=0), "`bytes_per_second` has to be a number above 0"),
        (lambda: Link(latency=-1.0, bytes_per_second=1), "`latency` has to be a number of at least 0"),
        (lambda: Link(bytes_per_second=1, shared=1), "`shared` has to be True or False"),
        (lambda: CostModel(per_token=0.0, per_pair=0.0), "one of `per_token` and `per_pair` has to be above 0"),
        (lambda: CostModel(per_token=-1.0, per_pair=0.0), "`per_token` has to be a number of at least 0"),
        (lambda: CostModel(per_token=1.0, per_pair=0.0, triangle=0.0), "`triangle` has to be a number above 0"),
        (
            lambda: CostModel(per_token=1.0, per_pair=0.0, projection_share=2.0),
            "`projection_share` has to be a number in",
        ),
    ],
)
def test_wrong_fields_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def count_by_hand(num_layers: int) -> int:
    """Weights of the tiny Llama: queries and output 128 x 128, keys and values 128 x 64, MLP 3 x 128 x 256."""
    return num_layers * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256)


def test_shapes_count_operations(tiny_model) -> None:
    model = tiny_model("llama")
    cost = CostModel.of_shapes(model)
    assert cost.per_token == 2 * count_by_hand(2)
    # Two layers, four heads, 32 channels, of a key and of a value, a multiplication and an addition
    assert cost.per_pair == 2 * 4 * 32 * 2 * 2
    assert cost.projection_share == pytest.approx(2 * 128 * 256 / count_by_hand(2))
    assert (cost.fixed, cost.triangle) == (0.0, TRIANGLE)
    assert CostModel.of_shapes(model.config) == cost


def test_shapes_of_other_architectures(tiny_model) -> None:
    """A window costs by token, not by pair; GPT-2's layers are no `Linear`, and count all the same."""
    hybrid = CostModel.of_shapes(tiny_model("gemma3-hybrid"))
    full = CostModel.of_shapes(tiny_model("gemma3-hybrid", layer_types=["full_attention"] * 4))
    attention = 4 * 4 * 32
    assert (hybrid.per_pair, full.per_pair) == (2 * attention, 4 * attention)
    assert hybrid.per_token - full.per_token == 2 * attention * 32
    gpt2 = CostModel.of_shapes(tiny_model("gpt2"))
    assert gpt2.per_token == 2 * 2 * 12 * 128 * 128


def test_experts_count_where_a_token_goes() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    one, three = (
        CostModel.of_shapes(
            CONFIG_MAPPING["mixtral"](**sizes, **heads, num_local_experts=6, num_experts_per_tok=count)
        )
        for count in (1, 3)
    )
    assert three.per_token - one.per_token == 2 * 2 * 3 * 32 * 48


def test_bytes_of_a_token(tiny_model) -> None:
    model = tiny_model("llama")
    assert bytes_of_token(model, torch.float32) == 2 * 2 * 32 * 4
    assert bytes_of_token(model.config, torch.bfloat16) == 2 * 2 * 32 * 2


def chain_by_hand(lengths: list[int], cost: CostModel, link: Link, bytes_per_token: int, num_layers: int) -> float:
    """The pipeline written as ranks live it, message by message."""
    done, link_free = [0.0] * len(lengths), [0.0] * len(lengths)
    for _ in range(num_layers):
        arrived = 0.0
        for rank, end in enumerate(itertools.accumulate(lengths)):
            projecting = cost.projection_share * (cost.fixed + cost.per_token * lengths[rank]) / num_layers
            ready = max(done[rank] + projecting, arrived)
            done[rank] = ready + cost.seconds(lengths[rank], end - lengths[rank]) / num_layers - projecting
            link_free[rank] = (
                max(ready, link_free[rank]) + link.latency + end * bytes_per_token / link.bytes_per_second
            )
            arrived = link_free[rank]
    return done[-1]


PARTITIONS = st.lists(st.integers(1, 3000), min_size=1, max_size=7)


@settings(max_examples=60, deadline=None)
@given(lengths=PARTITIONS, num_layers=st.integers(1, 9), bandwidth=st.floats(1e5, 1e12), latency=st.floats(0, 0.1))
def test_waves_are_the_chain(lengths: list[int], num_layers: int, bandwidth: float, latency: float) -> None:
    link = Link(latency=latency, bytes_per_second=bandwidth)
    expected = chain_by_hand(lengths, COST, link, 1000, num_layers)
    assert predict_ttft(lengths, COST, link, 1000, num_layers) == pytest.approx(expected)


@settings(max_examples=40, deadline=None)
@given(lengths=PARTITIONS, bandwidth=st.floats(1e5, 1e12), shared=st.booleans())
def test_slower_links_and_longer_slices_take_longer(lengths: list[int], bandwidth: float, shared: bool) -> None:
    def seconds(slices: list[int], speed: float, shared: bool = shared) -> float:
        return predict_ttft(slices, COST, Link(bytes_per_second=speed, shared=shared), 1000, 4)

    alone = COST.seconds(lengths[-1], sum(lengths[:-1]))
    assert seconds(lengths, bandwidth) <= seconds(lengths, bandwidth / 2)
    assert seconds(lengths, bandwidth) <= seconds([each + 1 for each in lengths], bandwidth)
    assert seconds(lengths, bandwidth, False) <= seconds(lengths, bandwidth, True)
    assert seconds(lengths, bandwidth) >= alone * (1 - 1e-9)


def test_one_rank_only_computes() -> None:
    link = Link(latency=9.0, bytes_per_second=1.0, shared=True)
    assert predict_ttft([700], COST, link, 1000, 5) == pytest.approx(COST.seconds(700, 0))
    assert predict_tsp_ttft(700, 1, COST, link, 1000, 5) == pytest.approx(COST.seconds(700, 0))


def test_many_partitions_at_once() -> None:
    partitions = np.array([[100.0, 200.0, 300.0], [300.0, 200.0, 100.0]])
    link = Link(bytes_per_second=1e7)
    together = predict_ttfts(partitions, COST, link, 1000, 4)
    assert together.tolist() == [predict_ttft(row, COST, link, 1000, 4) for row in ([100, 200, 300], [300, 200, 100])]


def test_tsp_waits_for_all_in_every_layer() -> None:
    link = Link(latency=1e-3, bytes_per_second=1e8)
    seconds = predict_tsp_ttft(900, 3, COST, link, 1000, 5)
    assert seconds == pytest.approx(COST.seconds(300, 600) + 5 * 2 * (1e-3 + 300 * 1000 / 1e8))
    shared = predict_tsp_ttft(900, 3, COST, Link(latency=1e-3, bytes_per_second=1e8, shared=True), 1000, 5)
    assert shared == pytest.approx(COST.seconds(300, 600) + 5 * 6 * (1e-3 + 300 * 1000 / 1e8))
