"""Planned steps of a layer that selects by its own query, beside the kernels of single steps."""

import copy

import pytest
import torch
import torch.nn.functional as F
from decoding import assert_same, decode_logits, make_model, tokens

from kvcache_plugins import InfiniGenCache
from kvcache_plugins.contract.comparison import reachable_bytes
from kvcache_plugins.formats.rotary import RotaryEmbedding
from kvcache_plugins.infinigen.config import InfiniGenConfig
from kvcache_plugins.infinigen.layer import InfiniGenLayer
from kvcache_plugins.infinigen.selection_plan import SelectionPlan
from kvcache_plugins.kernels.prepared_selection import prepare_by_codes
from kvcache_plugins.kernels.selective_attention import SelectionLimits
from kvcache_plugins.kernels.token_scores import KeyCodes
from kvcache_plugins.transform_coding.config import TransformCodingConfig


def filled(
    config: InfiniGenConfig, count: int, dims=(16, 16), batch_size=1, dtype=torch.float32, key_nbits=None
) -> InfiniGenLayer:
    """A layer of three heads that holds random tokens, as rows of a codec if their bits are given."""
    policy = None
    if key_nbits is not None:
        coding = TransformCodingConfig(key_nbits=key_nbits, value_nbits=3.25, num_sink_tokens=config.sink)
        policy = coding.policy(RotaryEmbedding(tuple((10000.0 ** -(torch.arange(0, 16, 2) / 16)).tolist())))
    layer = InfiniGenLayer(config, 0, policy=policy)
    layer.update(*(torch.randn(batch_size, 3, count, dim, dtype=dtype) for dim in dims))
    layer.commit_prompt()
    return layer


def attend(layer: InfiniGenLayer, new: tuple[torch.Tensor, ...], scale: float | None) -> torch.Tensor:
    """A step as a model makes it: attention of queries to what `update` returns of a key and a value."""
    query, *states = new
    return F.scaled_dot_product_attention(query, *layer.update(*states), scale=scale, enable_gqa=True)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    ("count", "options", "shape"),
    [
        # Pages are crossed, and tokens move into the pool on the way
        (1050, {}, {}),
        (90, {"scoring_nbits": 2, "min_weight": 1.5, "scale": 0.3}, {"dims": (16, 24), "batch_size": 2}),
        (200, {"scoring_nbits": 8, "recent": 3, "sink": 0}, {"groups": 5, "dtype": torch.bfloat16}),
        (150, {"max_fetch_ratio": 0.02, "recent": 70}, {"groups": 1, "dims": (18, 10), "dtype": torch.float16}),
        (1050, {}, {"key_nbits": 4}),
        (700, {"sink": 0, "scale": 0.4}, {"key_nbits": 4, "batch_size": 2, "dims": (16, 20), "groups": 5}),
        (300, {"min_weight": 1.5}, {"key_nbits": 2, "groups": 1, "dtype": torch.bfloat16}),
    ],
    ids=str,
)
def test_planned_steps_equal_single_kernels(count, options, shape, mode, monkeypatch) -> None:
    options, shape = dict(options), dict(shape)
    scale, groups = options.pop("scale", None), shape.pop("groups", 3)
    prepared = filled(InfiniGenConfig(**options), count, **shape)
    single = copy.deepcopy(prepared)
    monkeypatch.setattr(single, "_plan_next_steps", lambda *given: None)
    size, dtype = prepared.batch_size, prepared.dtype
    dims = [prepared.states_shape(side)[3] for side in ("keys", "keys", "values")]
    with mode():
        for step in range(45):
            heads = 3 * groups, 3, 3
            new = tuple(torch.randn(size, *each, dtype=dtype) for each in zip(heads, (1, 1, 1), dims, strict=True))
            torch.testing.assert_close(attend(prepared, new, scale), attend(single, new, scale), atol=1e-5, rtol=1e-3)
            if step == 20:
                # A copy has a plan of its own, and dropped tokens end a plan; recent ones are in the pool then
                prepared = copy.deepcopy(prepared)
                for layer in (prepared, single):
                    layer.crop_tokens(30)
    assert prepared.stats() == single.stats()
    assert prepared._plan is not None and single._plan is None
    # A plan holds no memory of its own
    held = {(each.data_ptr(), each.nbytes) for _, each in prepared.named_tensors()}
    assert reachable_bytes(prepared) == sum(size for _, size in held)
    for side in ("keys", "values"):
        assert torch.equal(prepared.to_dense(side), single.to_dense(side))


def test_unwritten_token_is_written_for_every_reader(monkeypatch) -> None:
    layer = filled(InfiniGenConfig(), 100)
    with torch.no_grad():
        for _ in range(3):
            attend(layer, tuple(torch.randn(1, 3, 1, 16) for _ in range(3)), None)
        key, value = torch.randn(2, 1, 3, 1, 16)
        keys, values = layer.update(key, value)
    assert layer.tail.unwritten is not None
    assert torch.equal(keys[:, :, -1:], key) and torch.equal(values[:, :, -1:], value)
    assert layer.tail.unwritten is None


@pytest.mark.parametrize("options", [{"pool_tokens": 60}, {"alpha": 4.0}, {"speculate": True}], ids=str)
def test_other_rules_and_pools_are_not_planned(options) -> None:
    layer = filled(InfiniGenConfig(**options), 100)
    with torch.no_grad():
        for _ in range(3):
            attend(layer, tuple(torch.randn(1, 3, 1, 16) for _ in range(3)), None)
    assert layer._plan is None


def test_steps_are_not_planned_while_beams_are_reordered() -> None:
    layer = filled(InfiniGenConfig(), 100)
    with torch.no_grad():
        for is_reordered in (True, True, True, False, False):
            assert layer._plan is None
            attend(layer, tuple(torch.randn(1, 3, 1, 16) for _ in range(3)), None)
            if is_reordered:
                layer.reorder_cache(torch.tensor([0]))
    assert layer._plan is not None


@pytest.mark.parametrize("num_threads", [2], indirect=True)
def test_results_do_not_depend_on_threads(num_threads: int) -> None:
    model, prompt, steps = make_model(), tokens(2100), tokens(6, seed=1)
    logits = []
    for count in (1, num_threads):
        torch.set_num_threads(count)
        cache = InfiniGenCache(model, full_layers=())
        logits.append(decode_logits(model, cache, prompt, steps))
    assert cache.layers[0]._plan is not None
    assert_same(*logits)


def planned() -> InfiniGenLayer:
    layer = filled(InfiniGenConfig(), 100)
    with torch.no_grad():
        for _ in range(2):
            attend(layer, tuple(torch.randn(1, 3, 1, 16) for _ in range(3)), None)
    assert isinstance(layer._plan, SelectionPlan)
    return layer


def test_a_plan_of_another_version_is_not_run() -> None:
    layer = planned()
    query, key, value = torch.randn(3, 1, 3, 1, 16)
    with torch.no_grad():
        layer.update(key, value)
        assert layer.run_plan(query, 103, None) is not None
        layer.pool.raise_version()
        assert layer.run_plan(query, 103, None) is None
        layer.update(key, value)
    # The token is in the storage, not left for the plan
    assert layer.tail.unwritten is None
    assert torch.equal(layer.tail.keys[:, :, -1:], key)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.crop_tokens(90),
        lambda layer: layer.reorder_cache(torch.tensor([0])),
        lambda layer: layer.set_padding(torch.tensor([3])),
    ],
    ids=["crop", "reorder", "padding"],
)
def test_changes_of_the_pool_raise_its_version_and_drop_the_plan(change) -> None:
    layer = planned()
    before = layer.pool.version
    change(layer)
    assert layer.pool.version > before
    assert layer._plan is None


def test_a_plan_remains_valid_while_only_the_tail_changes() -> None:
    layer = planned()
    plan = layer._plan
    layer.crop_tokens(1)
    with torch.no_grad():
        for _ in range(3):
            attend(layer, tuple(torch.randn(1, 3, 1, 16) for _ in range(3)), None)
    assert layer._plan is plan
    assert copy.deepcopy(layer)._plan is None


def test_prepared_steps_refuse_other_inputs() -> None:
    layer = planned()
    scoring, pages, tail = layer.scoring, layer.pool.pages, layer.tail
    query, key, value = torch.randn(3, 1, 3, 1, 16)
    steps = scoring.prepare_steps(query, 0.25, layer.pool, tail.storage)
    limits = SelectionLimits(first=0, newest=90, least=0.0, cap=5, limit=10)
    assert steps.attend(query, None, tail, limits) is not None
    for other in (query[..., :8], query.expand(2, -1, -1, -1), query.repeat(1, 2, 1, 1)):
        assert steps.attend(other, None, tail, limits) is None
    assert steps.attend(query, 0.5, tail, limits) is None
    wide = torch.cat([value, value], dim=3)[..., ::2]
    wrong = [
        {"length": tail.capacity + 1},
        {"length": -1},
        {"storage": tuple(states.double() for states in tail.storage)},
        {"storage": (tail.storage[0], tail.storage[1][:, :, 1:].contiguous())},
        {"storage": tuple(states.transpose(2, 3).contiguous().transpose(2, 3) for states in tail.storage)},
        {"unwritten": (key.double(), value)},
        {"unwritten": (key, value[..., :8])},
        {"unwritten": (key, wide)},
        {"unwritten": (key, value), "length": 0},
    ]
    length, storage = tail.length, tail.storage
    for changed in wrong:
        tail.length, tail.storage, tail.unwritten = length, storage, None
        for name, value_of in changed.items():
            setattr(tail, name, value_of)
        with pytest.raises(ValueError, match="the tail has to be|tokens in use|the newest token has to be"):
            steps.attend(query, None, tail, limits)
    tail.length, tail.storage, tail.unwritten = length, storage, None
    assert layer._plan.push_into(tail, key, value) and tail.length == length + 1
    # One token waits at a time
    assert not layer._plan.push_into(tail, key.clone(), value)
    assert steps.attend(query, None, tail, limits) is not None and tail.unwritten is None
    keys = KeyCodes(scoring.rows["codes"], scoring.rows["scale"], scoring.fitted["spread"], scoring.length, 4)
    for other in (tuple(each.half() for each in tail.storage), tuple(each[:, :2] for each in tail.storage)):
        with pytest.raises(ValueError, match="tail"):
            prepare_by_codes(query, 0.25, keys, pages, other)
    with pytest.raises(ValueError, match="`length` has to be from 1"):
        prepare_by_codes(query, 0.25, keys._replace(length=0), pages, tail.storage)
