"""Kernels of InfiniGen's steps compute what plain PyTorch does: in Triton's interpreter, or on a GPU."""

import itertools
import weakref
from collections import namedtuple

import pytest
import torch
from kernel_cases import DEVICE, Scored, needs_triton, random_codes

from kvcache_plugins.formats.rotary import RotaryEmbedding
from kvcache_plugins.infinigen.config import InfiniGenConfig
from kvcache_plugins.infinigen.layer import InfiniGenLayer
from kvcache_plugins.infinigen.selection import always_attended, max_selected, rule_of, select_tokens
from kvcache_plugins.infinigen.selection_plan import DeviceSelectionPlan
from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.kernels.kept_selection import KeptSelection
from kvcache_plugins.kernels.selective_attention import Selection, attend_fetched
from kvcache_plugins.layers.exact_tokens import ExactTail
from kvcache_plugins.transform_coding.config import TransformCodingConfig
from kvcache_plugins.triton_kernels.infinigen.attend import prepare_attention
from kvcache_plugins.triton_kernels.infinigen.choose import prepare_choice, prepare_count
from kvcache_plugins.triton_kernels.infinigen.push import prepare_exact_push
from kvcache_plugins.triton_kernels.infinigen.queries import prepare_rms_norm, prepare_rotation
from kvcache_plugins.triton_kernels.scores import prepare_code_scores, prepare_column_scores


pytestmark = needs_triton

LOG2_E = torch.tensor(torch.e).log2().item()
# Batch, key/value heads, query heads of each, channels of keys and values, slots of the pool, tokens of the tail
Sizes = namedtuple("Sizes", ["batch", "heads", "groups", "key_dim", "value_dim", "slots", "tail"])
SIZES = {
    "gqa": Sizes(2, 2, 3, 64, 64, 700, 37),
    "mqa-odd": Sizes(2, 1, 5, 20, 33, 513, 5),
    "mha-least": Sizes(1, 3, 1, 8, 8, 1, 1),
    "wide": Sizes(1, 1, 9, 256, 128, 90, 64),
}
# Tolerances by dtype, relative to the largest number
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def require_close(actual, expected, dtype=torch.float32):
    expected = expected.float()
    error = (actual.cpu().float() - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
    assert error <= TOLERANCES[dtype], error


def hidden_tokens(masking, sizes, length):
    """A mask `[B or 1, length]` and padding `[B]` for a kind of masking, and the columns that both stand for."""
    positions = torch.arange(length)
    padding = torch.tensor([0, sizes.slots // 3])[-sizes.batch :]
    columns = positions >= padding[:, None]
    if masking == "padding":
        return None, padding, columns
    if masking == "none":
        return None, None, None
    columns = columns & (torch.rand(length, generator=torch.Generator().manual_seed(9)) < 0.7)
    # Some slots of the last sequence alone
    columns[-1, : max(sizes.slots - 3, 0)] &= masking != "nearly all"
    return columns.repeat_interleave(2, dim=1)[:, ::2], None, columns


RULES = {
    "weight": {"min_weight": 0.7},
    "weight-few": {"min_weight": 0.1, "max_fetch_ratio": 0.03},
    "least": {"min_weight": 0.9, "max_fetch_ratio": 0.3, "sink": 0, "recent": 1},
    "everything": {"alpha": float("inf"), "max_fetch_ratio": 1.0},
    "alpha": {"alpha": 1.5},
    "alpha-few": {"alpha": 3.0, "max_fetch_ratio": 0.05},
}


@pytest.mark.parametrize("masking", ["none", "padding", "mask", "nearly all"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["gqa", pytest.param("mqa-odd", marks=pytest.mark.long), "mha-least"])
def test_chosen_tokens_equal_pytorch(name, rule, masking):
    """The newest token is not stored yet; scores repeat themselves, so that some weights are equal."""
    sizes, config = SIZES[name], InfiniGenConfig(**RULES[rule])
    batch, heads, groups, slots = sizes.batch, sizes.heads, sizes.groups, sizes.slots
    length = slots + sizes.tail + 1
    scores = randn(batch, heads, groups, slots) * 2
    scores[..., slots // 2 :] = scores[..., : slots - slots // 2].flip(3)
    query, tail = (
        randn(batch, heads * groups, 1, sizes.key_dim, seed=1),
        randn(batch, heads, 70, sizes.key_dim, seed=2),
    )
    mask, padding, columns = hidden_tokens(masking, sizes, length)
    held, forced, tail_scores = length, None, query.view(batch, heads, groups, -1) @ tail[:, :, : sizes.tail].mT * 0.3
    allowed = None
    if columns is not None:
        allowed, forced = columns[:, None, :slots], always_attended(columns, config)[:, None, :slots]
        tail_scores = tail_scores.masked_fill(~columns[:, None, None, slots : length - 1], -torch.inf)
        held = columns.sum(dim=1)
    expected = select_tokens(scores, tail_scores, allowed, forced, held, length, config)
    made, limit = rule_of(config), max_selected(config, length, slots)
    given = [None if each is None else each.to(DEVICE) for each in (scores * LOG2_E, query, tail, mask, padding)]
    found, count = (
        torch.full((batch, heads, limit), -7, device=DEVICE),
        torch.empty(batch, heads, device=DEVICE).long(),
    )
    wanted = None
    if made.distance is not None:
        wanted = prepare_count(given[0], *given[3:], made.distance, torch.empty_like(count))()
    options = {"ratio": torch.tensor([made.ratio], dtype=torch.float64, device=DEVICE), "wanted": wanted}
    options |= {"min_weight": made.min_weight, "num_first": made.num_first, "num_newest": made.num_newest}
    options |= {"scale": 0.3, "weights": torch.empty_like(given[0][:, :, 0]), "slots": found, "count": count}
    prepare_choice(*given[:3], sizes.tail, length, limit, *given[3:], **options)()
    assert torch.equal(count.cpu(), expected.count)
    for item, head in itertools.product(range(batch), range(heads)):
        number = int(count[item, head])
        own = found[item, head].tolist()
        assert own[:number] == sorted(set(own[:number])) and set(own[number:]) <= {0}
        theirs = expected.slots[item, head, :number]
        if set(own[:number]) != set(theirs.tolist()):
            # Tokens with equal weights may be exchanged
            weights = torch.cat([scores, tail_scores], dim=3).softmax(dim=3).mean(dim=2)[item, head]
            torch.testing.assert_close(weights[own[:number]].sort().values, weights[theirs].sort().values)


@pytest.mark.parametrize("is_masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_attention_equals_pytorch(name, dtype, is_masked):
    """Filling and what lies behind the tail is NaN, and one head has no chosen token."""
    sizes = SIZES[name]
    batch, heads, groups, slots = sizes.batch, sizes.heads, sizes.groups, sizes.slots
    limit = max(slots // 3, 1)
    generator = torch.Generator().manual_seed(3)
    chosen = torch.rand(batch, heads, slots, generator=generator).argsort(dim=2)[:, :, :limit].contiguous()
    count = torch.randint(0, limit + 1, (batch, heads), generator=generator)
    count[0, 0], count[-1, -1] = limit, 0
    rows = randn(batch, heads, limit, sizes.key_dim + sizes.value_dim, seed=4, dtype=dtype)
    rows[torch.arange(limit) >= count[..., None]] = torch.nan
    tail = [randn(batch, heads, 70, dim, seed=5, dtype=dtype) for dim in (sizes.key_dim, sizes.value_dim)]
    query = randn(batch, heads * groups, 1, sizes.key_dim, seed=6, dtype=dtype)
    mask = None
    if is_masked:
        mask, _, _ = hidden_tokens("mask", sizes, slots + sizes.tail)
        # Nothing at all for the last head
        mask[-1, slots:] = False
    call_mask = None if mask is None else mask[:, None, None]
    call = AttentionCall(query.view(batch, heads, groups, -1), call_mask, scale=0.2)
    fetched = rows.split([sizes.key_dim, sizes.value_dim], dim=3)
    newest = tuple(states[:, :, : sizes.tail] for states in tail)
    expected = attend_fetched(call, fetched, count, newest, slots, chosen)
    for states in tail:
        states[:, :, sizes.tail :] = torch.nan
    total = torch.tensor(5, device=DEVICE)
    given = [each.to(DEVICE) for each in (query, rows, chosen, count)]
    placed = tuple(each.to(DEVICE) for each in tail), sizes.tail, slots, None if mask is None else mask.to(DEVICE)
    attention, merging = prepare_attention(*given, *placed, 0.2, total, num_sms=8)
    attention()
    output = merging()
    assert output.shape == (batch, heads * groups, 1, sizes.value_dim) and output.dtype == dtype
    require_close(output.view(expected.shape), expected, dtype)
    assert int(total) == 5 + int(count.sum())


def test_a_plan_pushes_tokens_of_as_many_sequences_alone():
    plan = DeviceSelectionPlan(randn(2, 4, 1, 16).to(DEVICE), 2, rule_of(InfiniGenConfig()), 0.25)
    for batch_size, fits in ((2, True), (4, False), (1, False)):
        states, new = randn(batch_size, 2, 3, 16).to(DEVICE), randn(batch_size, 2, 1, 16, seed=1).to(DEVICE)
        tail = ExactTail(states, states, 8)
        assert plan.push_into(tail, new, new) is fits
        assert not fits or torch.equal(tail.keys[:, :, 3:], new)


def test_kept_launches_keep_no_rows_of_earlier_steps():
    query, rows, states = (randn(*shape).to(DEVICE) for shape in ((1, 4, 1, 16), (1, 2, 3, 32), (1, 2, 3, 16)))
    steps, tail = KeptSelection(query, 2, rule_of(InfiniGenConfig()), 0.25), ExactTail(states, states, 8)
    slots, count = torch.arange(3, device=DEVICE).repeat(1, 2, 1), torch.full((1, 2), 3, device=DEVICE)
    selection, fetched = Selection(slots, count), torch.tensor(0, device=DEVICE)
    steps.attend(query, rows, selection, tail, 3, None, fetched)
    earlier = weakref.ref(rows)
    del rows
    assert earlier() is None


@pytest.mark.parametrize("most_programs", [None, 2])
def test_scores_of_codes_take_spread_and_factor(most_programs):
    scored = Scored(2, 2, 3, 20, 4, 300)
    query, codes, scale, keys = random_codes(scored)
    spread = randn(2, 2, 20, seed=1).abs()
    expected = query.double() @ (keys * spread.double()[:, :, None]).mT * 0.25
    given = [each.to(DEVICE) for each in (query, codes[:, :, :300], scale[:, :, :300])]
    options = {"spread": spread.to(DEVICE), "factor": 0.25, "most_programs": most_programs}
    require_close(prepare_code_scores(*given, 4, **options)(), expected)


@pytest.mark.parametrize("most_programs", [None, 3])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_scores_of_columns_equal_pytorch(dtype, most_programs):
    query = randn(2, 3, 4, 36, dtype=dtype)
    columns, rotation = randn(2, 3, 200, 11, seed=1, dtype=dtype), randn(2, 3, 36, 11, seed=2, dtype=dtype)
    expected = query.double() @ rotation.double() @ columns[:, :, :150].double().mT * 0.5
    given = query.to(DEVICE), columns.to(DEVICE), 150, rotation.to(DEVICE)
    actual = prepare_column_scores(*given, 0.5, most_programs)()
    assert actual.shape == (2, 3, 4, 150)
    require_close(actual, expected)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_token_is_pushed_to_its_place(dtype):
    new = [randn(2, 3, 1, dim, seed=dim, dtype=dtype).to(DEVICE) for dim in (20, 33)]
    tail = [randn(2, 3, 9, dim, dtype=dtype).to(DEVICE) for dim in (20, 33)]
    expected = [states.clone() for states in tail]
    made = prepare_exact_push(tuple(new), tuple(tail))
    made._replace(arguments={**made.arguments, "place": 6})()
    for own, states, token in zip(tail, expected, new, strict=True):
        states[:, :, 6:7] = token
        assert torch.equal(own, states)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_norm_equals_pytorch(dtype, offset):
    states, weight = randn(2, 1, 1500, dtype=dtype), randn(1500, seed=1, dtype=dtype)
    expected = torch.nn.functional.rms_norm(states.double(), (1500,), weight.double() + offset, 1e-3)
    require_close(prepare_rms_norm(states.to(DEVICE), weight.to(DEVICE), 1e-3, offset)(), expected, dtype)


@pytest.mark.parametrize(("batch", "rotated"), [(1, 36), (2, 36), (2, 20)])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_rotation_equals_pytorch(dtype, batch, rotated):
    """Strided states, and angles that sequences share or not."""
    states = randn(2, 1, 3 * 36 + 5, dtype=dtype)[..., : 3 * 36]
    cosines, sines = (randn(batch, 1, rotated, seed=seed, dtype=dtype) for seed in (1, 2))
    heads = states.unflatten(2, (3, 36)).transpose(1, 2).double()
    own, rest = heads[..., :rotated], heads[..., rotated:]
    first, second = own.chunk(2, dim=3)
    turned = own * cosines[:, None].double() + torch.cat((-second, first), dim=3) * sines[:, None].double()
    actual = prepare_rotation(*(each.to(DEVICE) for each in (states, cosines, sines)), 36)()
    require_close(actual, torch.cat((turned, rest), dim=3), dtype)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_rotation_follows_a_norm_of_heads(dtype, offset):
    states, weight = randn(2, 1, 3 * 36, dtype=dtype), randn(36, seed=3, dtype=dtype)
    cosines, sines = (randn(1, 1, 20, seed=seed, dtype=dtype) for seed in (1, 2))
    heads = states.unflatten(2, (3, 36)).transpose(1, 2).double()
    normed = torch.nn.functional.rms_norm(heads, (36,), weight.double() + offset, 1e-3)
    own, rest = normed[..., :20], normed[..., 20:]
    first, second = own.chunk(2, dim=3)
    turned = own * cosines[:, None].double() + torch.cat((-second, first), dim=3) * sines[:, None].double()
    given = (each.to(DEVICE) for each in (states, cosines, sines))
    actual = prepare_rotation(*given, 36, weight.to(DEVICE), 1e-3, offset)()
    require_close(actual, torch.cat((turned, rest), dim=3), dtype)


# Channels of keys and values, padding of both sequences, exact first tokens
ROWS = {
    "alike": ((32, 32), None, 4),
    "unlike, padded": ((32, 20), (0, 70), 3),
    "no exact ones": ((32, 48), (3, 0), 0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_decoded_rows_equal_pytorch(name, dtype, monkeypatch):
    """Rows of a layer, chosen in any order; what lies behind a head's count is left alone."""
    dims, padding, num_first = ROWS[name]
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "torch")
    coding = TransformCodingConfig(key_nbits=4, value_nbits=3.25, num_sink_tokens=num_first)
    frequencies = tuple((10000.0 ** -(torch.arange(0, 32, 2) / 32)).tolist())
    layer = InfiniGenLayer(InfiniGenConfig(sink=num_first), 0, policy=coding.policy(RotaryEmbedding(frequencies)))
    states = [randn(2, 3, 400, dim, seed=dim, dtype=dtype).to(DEVICE) for dim in dims]
    layer.load_prompt(*states, None if padding is None else torch.tensor(padding, device=DEVICE))
    pool, scoring = layer.pool, layer.scoring
    generator = torch.Generator().manual_seed(3)
    order = torch.rand(2, 3, pool.num_slots, generator=generator)
    # Padding is never chosen
    order[1, :, : max(padding or (0,))] = 2.0
    slots = order.argsort(dim=2)[:, :, :200].contiguous()
    slots[:, :, 0] = max(padding or (0,))
    count = torch.tensor([[200, 0, 37], [1, 200, 16]])
    selection = Selection(slots.to(DEVICE), count.to(DEVICE))
    rows = pool.gather(selection.slots)
    expected = torch.cat(scoring.dense(rows, selection.slots, pool), dim=3)
    rows[~selection.valid] = 255
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "triton")
    query = randn(2, 6, 1, dims[0], dtype=dtype).to(DEVICE)
    steps = KeptSelection(query, 3, rule_of(layer.config), 0.2)
    # Scores of another scale need launches of their own
    assert steps.fits(query, 0.2) and not steps.fits(query, 0.3)
    for launch in range(3):
        if launch == 2:
            # Sequences change places, and so do the tables that launches were prepared with
            layer.reorder_cache(torch.tensor([1, 0]))
            selection = Selection(selection.slots.flip(0), selection.count.flip(0))
            rows, expected = rows.flip(0), expected.flip(0)
            count = count.flip(0)
        tokens = scoring._prepared(pool).tokens
        found = steps.decode_rows(rows, selection, tokens, pool.version)
        for item, head in itertools.product(range(2), range(3)):
            number = int(count[item, head])
            if number:
                require_close(found[item, head, :number], expected[item, head, :number].cpu(), dtype)
