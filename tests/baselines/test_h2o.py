"""H2O on whole models: against a plain simulation over dense states, its budgets, bytes, rollbacks and refusals;
attention in tiles of queries against plain softmax, for every kind of mask.
"""

import math
from functools import partial

import pytest
import torch
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama import modeling_llama

from kvcache_plugins import H2OCache, create_cache
from kvcache_plugins.baselines import h2o
from kvcache_plugins.baselines.h2o import H2OLayer, attend_and_weigh, sum_weights
from kvcache_plugins.contract import CONTRACT, run_check
from kvcache_plugins.eval.tiny_models import build_family
from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.reports.memory import reachable_tensors


TOLERANCE = 1e-5
SMALL = {"min_tokens": 4}
PADDING = (0, 17, 41)
PROMPT_LENGTH = 60
# A chunk of several tokens between single steps
STEPS = (1, 1, 1, 9, 1, 1, 5, 1, 1, 1)


class PlainH2O:
    """
    H2O as Llama's eager attention over a dense cache whose dropped tokens are masked: nothing in tiles, nothing moved,
    every sequence and head independently.
    """

    def __init__(self, heavy_ratio, recent_ratio, min_tokens, grow, padding):
        self.share, self.recent_share = heavy_ratio + recent_ratio, recent_ratio / (heavy_ratio + recent_ratio)
        self.min_tokens, self.grow, self.padding = min_tokens, grow, padding
        # The prompt's length and the weights of every sequence's and head's tokens, by layer
        self.layers = {}

    def __call__(self, module, query, key, value, attention_mask, scaling, **kwargs):
        batch_size, num_heads, num_queries, _ = query.shape
        length, num_kept_heads = key.shape[2], key.shape[1]
        groups = num_heads // num_kept_heads
        is_prompt = module.layer_idx not in self.layers
        if is_prompt:
            kept = {(item, head): {} for item in range(batch_size) for head in range(num_kept_heads)}
            self.layers[module.layer_idx] = (length, kept)
        prompt_length, kept = self.layers[module.layer_idx]
        output = torch.zeros_like(query)
        for (item, head), weight_of in kept.items():
            if not is_prompt:
                self.drop(weight_of, length - num_queries, prompt_length, self.padding[item])
            first = max(length - num_queries, self.padding[item])
            weight_of.update(dict.fromkeys(range(first, length), 0.0))
            positions = sorted(weight_of)
            for query_head in range(head * groups, (head + 1) * groups):
                scores = query[item, query_head] @ key[item, head, positions].T * scaling
                rows = torch.arange(length - num_queries, length)[:, None]
                weights = scores.masked_fill(torch.tensor(positions) > rows, -torch.inf).softmax(dim=1)
                output[item, query_head] = weights.nan_to_num(0) @ value[item, head, positions]
                for position, weight in zip(positions, weights.nan_to_num(0).sum(dim=0).tolist(), strict=True):
                    weight_of[position] += weight
            if is_prompt:
                self.drop(weight_of, length, prompt_length, self.padding[item])
        return output.transpose(1, 2).contiguous(), None

    def drop(self, weight_of, length, prompt_length, padding):
        num_tokens = length - padding
        base = num_tokens if self.grow else prompt_length - padding
        budget = min(num_tokens, max(math.floor(self.share * base + 1e-9), self.min_tokens))
        recent = math.floor(budget * self.recent_share + 1e-9)
        older = [position for position in weight_of if position < length - recent]
        older.sort(key=lambda position: weight_of[position], reverse=True)
        for position in older[budget - recent :]:
            del weight_of[position]


@torch.no_grad()
def feed(model, cache, tokens, mask=None):
    """Logits of one forward; `mask` is over all tokens."""
    mask = torch.ones(len(tokens), cache.get_seq_length() + tokens.shape[1]) if mask is None else mask
    positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
    return model(tokens, attention_mask=mask, position_ids=positions, past_key_values=cache).logits


def run(model, cache, padding, sizes=STEPS):
    """Logits of a padded prompt's last tokens and of all later ones, and how many tokens were fed."""
    torch.manual_seed(1)
    mask = (torch.arange(PROMPT_LENGTH) >= torch.tensor(padding)[:, None]).long()
    tokens = torch.randint(3, model.config.vocab_size, mask.shape) * mask
    logits = [feed(model, cache, tokens, mask)[:, -1:]]
    for size in sizes:
        mask = torch.cat([mask, mask.new_ones(len(mask), size)], dim=1)
        logits.append(feed(model, cache, torch.randint(3, model.config.vocab_size, (len(mask), size)), mask))
    return torch.cat(logits, dim=1)


@pytest.mark.each_value
@pytest.mark.parametrize("grow", [True, False], ids=["growing", "fixed"])
@pytest.mark.parametrize("padding", [(0,), PADDING], ids=["alone", "padded"])
@pytest.mark.parametrize("architecture", ["llama", "llama-mha", "llama-mqa"])
def test_logits_equal_a_plain_simulation(tiny_model, monkeypatch, architecture, padding, grow):
    model = tiny_model(architecture)
    options = {"heavy_ratio": 0.15, "recent_ratio": 0.1, "grow": grow, **SMALL}
    cache = H2OCache(model.config, **options)
    logits = run(model, cache, padding)
    assert cache.stats()["tokens_dropped"] > 0
    assert cache.stats()["dense_reads"] == 0

    reference = PlainH2O(**options, padding=padding)
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", reference)
    model.set_attn_implementation("eager")
    expected = run(model, DynamicCache(), padding)
    assert torch.allclose(logits, expected, rtol=0, atol=TOLERANCE * expected.abs().max().item())
    for layer_idx, layer in enumerate(cache.layers):
        positions = layer.slots.positions
        for (item, head), weight_of in reference.layers[layer_idx][1].items():
            assert positions[item, head][positions[item, head] >= 0].sort().values.tolist() == sorted(weight_of)


def test_logits_do_not_depend_on_the_tile_size(tiny_llama, monkeypatch):
    """Checks that no weights, of a prompt or a chunk, depend on how many queries fit a tile."""
    expected = run(tiny_llama, H2OCache(**SMALL), PADDING)
    for numbers in (1, 5000):
        monkeypatch.setitem(h2o._TILE_NUMBERS, "cpu", numbers)
        logits = run(tiny_llama, H2OCache(**SMALL), PADDING)
        assert torch.allclose(logits, expected, rtol=0, atol=TOLERANCE * expected.abs().max().item())


@pytest.mark.each_value
@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("ratios", [(0.5, 0.5), (0.9, 0.1), (1.0, 1.0)], ids=str)
def test_shares_that_sum_to_one_equal_a_dense_cache(tiny_model, ratios, attn_implementation):
    model = tiny_model("llama", attn_implementation=attn_implementation)
    for grow in (True, False):
        cache = H2OCache(model.config, heavy_ratio=ratios[0], recent_ratio=ratios[1], grow=grow)
        expected = run(model, DynamicCache(), PADDING)
        assert torch.allclose(run(model, cache, PADDING), expected, rtol=0, atol=TOLERANCE * expected.abs().max())
        assert cache.stats()["tokens_dropped"] == 0


def test_kept_tokens_follow_the_budget(tiny_llama):
    cache = H2OCache(heavy_ratio=0.1, recent_ratio=0.1)
    feed(tiny_llama, cache, torch.randint(3, 128, (2, 400)))
    for _ in range(12):
        length = cache.get_seq_length()
        for layer in cache.layers:
            # Beside the newest token: of it, nothing is dropped before the next update
            num_kept = math.floor(0.2 * (length - 1 if length > 400 else length)) + (length > 400)
            assert (layer.slots.count() == num_kept).all()
            positions = layer.slots.positions
            newest = torch.arange(length - num_kept // 2, length)
            assert (positions[..., None] == newest).any(dim=2).all()
        feed(tiny_llama, cache, torch.randint(3, 128, (2, 1)))
    stats = cache.stats()
    assert stats["tokens_cached"] == 412
    assert stats["tokens_kept"] == 2 * 83
    assert stats["tokens_dropped"] == 2 * (412 - 83)
    assert stats["layers_dropping"] == stats["num_layers"] == 2
    assert stats["attend_calls"] == 2 * 12
    assert stats["updates_without_weights"] == stats["prompts_without_mask"] == 0


def test_fixed_budget_keeps_storage_in_place(tiny_llama):
    cache = H2OCache(heavy_ratio=0.1, recent_ratio=0.1, grow=False)
    feed(tiny_llama, cache, torch.randint(3, 128, (2, 400)))
    feed(tiny_llama, cache, torch.randint(3, 128, (2, 1)))
    storage = [layer.slots.keys.data_ptr() for layer in cache.layers]
    for _ in range(40):
        feed(tiny_llama, cache, torch.randint(3, 128, (2, 1)))
        assert all((layer.slots.count() == 81).all() for layer in cache.layers)
    assert [layer.slots.keys.data_ptr() for layer in cache.layers] == storage


def test_memory_counts_stored_tensors_and_is_small(tiny_llama):
    cache = H2OCache(heavy_ratio=0.05, recent_ratio=0.05)
    feed(tiny_llama, cache, torch.randint(3, 128, (2, 1000)))
    right_after_prompt = cache.memory()
    # Positions, weights and nothing else beside a tenth of the states
    assert right_after_prompt.parts["kept"] == right_after_prompt.dense_bytes // 10
    for _ in range(30):
        feed(tiny_llama, cache, torch.randint(3, 128, (2, 1)))
    report = cache.memory()
    assert report.total_bytes == sum(
        {tensor.data_ptr(): tensor.nbytes for tensor in reachable_tensors(cache)}.values()
    )
    assert set(report.parts) == {"kept", "index"}
    assert report.total_bytes < 0.16 * report.dense_bytes


def test_memory_of_a_chunk_is_released(tiny_llama):
    cache = H2OCache(heavy_ratio=0.05, recent_ratio=0.05)
    for size in (500, 500):
        feed(tiny_llama, cache, torch.randint(3, 128, (1, size)))
    assert cache.layers[0].slots.positions.shape[2] == 550
    # Weights that a rollback would revoke are those of 32 queries, not a view of all 500
    newest = cache.layers[0].slots.newest_weights
    assert newest.untyped_storage().nbytes() == newest.nbytes
    feed(tiny_llama, cache, torch.randint(3, 128, (1, 1)))
    assert cache.layers[0].slots.positions.shape[2] == 101


@pytest.mark.parametrize(("size", "count"), [(1, 1), (6, 4), (50, 30), (50, 50)])
def test_crop_of_the_newest_update_leaves_no_trace(tiny_llama, size, count):
    prompt, drafted = torch.randint(3, 128, (2, 100)), torch.randint(3, 128, (2, size))
    steps = torch.randint(3, 128, (2, 8)).split(1, dim=1)
    cropped, straight = H2OCache(**SMALL), H2OCache(**SMALL)
    for cache in (cropped, straight):
        feed(tiny_llama, cache, prompt)
        feed(tiny_llama, cache, steps[0])
    feed(tiny_llama, cropped, drafted)
    cropped.crop(-count)
    if count < size:
        feed(tiny_llama, straight, drafted[:, :-count])
    if size > 32 and count > 32:
        # Beyond what can be taken back, the weights of removed queries stay
        assert cropped.get_seq_length() == straight.get_seq_length()
        return
    for step in steps[1:]:
        logits, expected = (feed(tiny_llama, cache, step) for cache in (cropped, straight))
        assert torch.allclose(logits, expected, rtol=0, atol=TOLERANCE * expected.abs().max().item())


def test_crop_into_dropped_history_keeps_lengths_and_positions_right(tiny_llama):
    cache = H2OCache(heavy_ratio=0.1, recent_ratio=0.1, min_tokens=10)
    feed(tiny_llama, cache, torch.randint(3, 128, (2, 200)))
    before = [layer.slots.positions for layer in cache.layers]
    cache.crop(-120)
    assert cache.get_seq_length() == 80
    assert cache.get_mask_sizes(1, 0) == (81, 0)
    for layer, positions in zip(cache.layers, before, strict=True):
        assert (layer.slots.count() == ((positions >= 0) & (positions < 80)).sum(dim=2)).all()
        assert layer.slots.positions.max() < 80
    # Below the budget nothing is dropped until new tokens have filled it
    counts = [layer.slots.count() for layer in cache.layers]
    feed(tiny_llama, cache, torch.randint(3, 128, (2, 3)))
    for layer, count in zip(cache.layers, counts, strict=True):
        assert (layer.slots.count() == count.clamp(max=16) + 3).all()
    assert cache.get_seq_length() == 83
    cache.crop(-83)
    assert cache.get_seq_length() == 0
    assert cache.memory().total_bytes == 0


def read_dense(module, query, key, value, *args, **kwargs):
    """Attention that shows nothing of its weights, as flash attention."""
    return sdpa_attention_forward(module, query, key + 0, value + 0, *args, **kwargs)


def test_attention_that_shows_no_weights_is_refused_when_tokens_would_be_dropped(tiny_model, monkeypatch):
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", read_dense)
    model = tiny_model("llama", attn_implementation="eager")
    cache = H2OCache(model.config)
    prompt = torch.randint(3, 128, (2, 30))
    assert torch.equal(feed(model, cache, prompt), feed(model, DynamicCache(), prompt))
    feed(model, cache, prompt[:, :10])
    length, memory = cache.get_seq_length(), cache.memory()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"layer 0 .*not show them.*`attn_implementation` to `sdpa` or `eager`"):
            feed(model, cache, prompt[:, :1])
        assert (cache.get_seq_length(), cache.memory()) == (length, memory)
    assert cache.stats()["updates_without_weights"] == 3
    assert cache.stats()["prompts_without_mask"] == 2
    assert cache.stats()["tokens_dropped"] == 0
    # A whole cache can be read, one that has dropped tokens cannot
    model.set_attn_implementation("sdpa")
    dropping = H2OCache(model.config)
    feed(model, dropping, prompt.repeat(1, 3))
    model.set_attn_implementation("eager")
    with pytest.raises(
        ValueError, match=r"layer 0 has dropped tokens.*attention that reads them is supported.*`sdpa`"
    ):
        feed(model, dropping, prompt[:, :1])


def test_attention_that_a_model_writes_out_itself_is_refused_when_tokens_would_be_dropped():
    model, tokens = build_family("bloom"), torch.randint(5, 90, (2, 60))
    cache = H2OCache(model.config, **SMALL)
    feed(model, cache, tokens)
    with pytest.raises(ValueError, match="does not show them to the cache: .*writes attention out"):
        feed(model, cache, tokens[:, :1])


@pytest.mark.parametrize("family", ["deepseek_v3", "gemma2", "gpt_oss"])
def test_tokens_are_dropped_with_latent_states_softcaps_and_sinks(family):
    """Drops tokens of latent states, and with softcaps and sinks."""
    model, tokens = build_family(family), torch.randint(5, 90, (2, 60))
    cache = H2OCache(model.config, **SMALL)
    logits = [feed(model, cache, tokens)]
    logits += [feed(model, cache, tokens[:, :size]) for size in (1, 1, 5, 1)]
    stats = cache.stats()
    assert stats["tokens_dropped"] > 0
    assert stats["dense_reads"] == stats["updates_without_weights"] == 0
    assert torch.cat(logits, dim=1).isfinite().all()


def test_short_sequences_can_be_read_dense(tiny_llama):
    cache, dense = H2OCache(), DynamicCache()
    for size in (20, 1, 4):
        tokens = torch.randint(3, 128, (2, size))
        for each in (cache, dense):
            feed(tiny_llama, each, tokens)
    # Cropped tokens leave free slots, which hold no token
    for each in (cache, dense):
        each.crop(-2)
    for layer, exact in zip(cache.layers, dense.layers, strict=True):
        for side in ("keys", "values"):
            assert torch.allclose(getattr(layer, side) + 0, getattr(exact, side), atol=1e-4)
    assert cache.stats()["dense_reads"] == 4


def test_only_full_attention_layers_drop_tokens(tiny_model):
    model = tiny_model("gemma3-hybrid")
    cache = create_cache("h2o", model)
    feed(model, cache, torch.randint(3, 128, (2, 300)))
    assert [type(layer) is H2OLayer for layer in cache.layers] == [False, True, False, True]
    assert cache.stats()["layers_dropping"] == 2
    assert cache.stats()["num_layers"] == 4
    with pytest.warns(UserWarning, match="all layers of the model attend to a window"):
        H2OCache(tiny_model("mistral-sliding").config)


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2", "opt", "mistral-sliding"])
def test_without_config_every_layer_drops_tokens(tiny_model, architecture):
    model = tiny_model(architecture, **({"sliding_window": None} if architecture == "mistral-sliding" else {}))
    cache = H2OCache()
    tokens = model.generate(torch.randint(3, 128, (2, 200)), past_key_values=cache, max_new_tokens=8, do_sample=False)
    assert tokens.shape == (2, 208)
    assert cache.stats()["layers_dropping"] == 2
    assert cache.stats()["dense_reads"] == 0
    cache.reset()
    assert cache.get_seq_length() == cache.memory().total_bytes == cache.stats()["tokens_kept"] == 0


# A random model has no heavy hitters, so that with the default shares it is farther from a dense cache than the
# contract allows; what that keeps the contract from reaching is run here
@pytest.mark.parametrize(
    "item", ["greedy", "sampling", "num-return-sequences", "multi-turn", "chunked-prefill", "hybrid"]
)
def test_contract_holds_with_larger_shares(item, contract_models):
    check = next(check for check in CONTRACT if check.name == item)
    model = contract_models["hybrid" if check.on_hybrid else "llama"]
    result = run_check(check, model, partial(create_cache, "h2o", model, heavy_ratio=0.4, recent_ratio=0.4))
    assert result.status == "pass", result.detail


B, H, G, Q, L, D = 2, 2, 3, 7, 19, 8
MASKS = ("none", "causal", "bool", "float", "by-head", "one-row", "two-dims")


def make_mask(kind):
    causal = torch.ones(Q, L, dtype=torch.bool).tril(L - Q)
    padding = torch.arange(L) >= torch.tensor([0, 5])[:, None, None, None]
    return {
        "none": None,
        "causal": None,
        "bool": causal & padding,
        "float": torch.randn(B, 1, Q, L).masked_fill(~(causal & padding), torch.finfo(torch.float32).min),
        "by-head": torch.rand(1, H * G, Q, L) < 0.7,
        "one-row": padding,
        "two-dims": causal,
    }[kind]


def plain(query, keys, mask, is_causal, allowed):
    """Softmax weights `[B, H * G, Q, S]`, zero in rows without a token."""
    scores = query @ keys.repeat_interleave(G, dim=1).transpose(2, 3) * D**-0.5
    if is_causal:
        mask = torch.ones(Q, L, dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return (
        scores.masked_fill(~allowed.repeat_interleave(G, dim=1)[:, :, None], -torch.inf).softmax(dim=-1).nan_to_num(0)
    )


@pytest.mark.parametrize("tile_numbers", [1, B * H * G * L * 3, 1 << 24], ids=["row", "three", "whole"])
@pytest.mark.parametrize("kind", MASKS)
def test_score_sums_equal_plain_attention_weights(monkeypatch, kind, tile_numbers):
    monkeypatch.setitem(h2o._TILE_NUMBERS, "cpu", tile_numbers)
    query, keys, mask = torch.randn(B, H * G, Q, D), torch.randn(B, H, L, D), make_mask(kind)
    weights = plain(query, keys, mask, kind == "causal", torch.ones(B, H, L, dtype=torch.bool))
    real = torch.arange(Q) >= torch.tensor([0, 3])[:, None]
    for real_queries in (None, real):
        counted = weights if real_queries is None else weights * real[:, None, :, None]
        expected = counted.unflatten(1, (H, G)).sum(dim=(2, 3))
        call = AttentionCall(query, mask, is_causal=kind == "causal")
        assert torch.allclose(sum_weights(call, keys, L, real_queries), expected, atol=1e-5)


@pytest.mark.parametrize("tile_numbers", [1, 1 << 24], ids=["row", "whole"])
@pytest.mark.parametrize("kind", MASKS)
def test_attention_over_slots_equals_plain_attention(monkeypatch, kind, tile_numbers):
    monkeypatch.setitem(h2o._TILE_NUMBERS, "cpu", tile_numbers)
    query, mask = torch.randn(B, H * G, Q, D), make_mask(kind)
    keys, values = torch.randn(B, H, L, D), torch.randn(B, H, L, D + 2)
    # Every head has its slots in an order of its own, some of them free; what is in those must not matter
    order = torch.rand(B, H, L).argsort(dim=2)[:, :, : L - 4]
    free = torch.rand(order.shape) < 0.3
    slots = [states.gather(2, order[..., None].expand(*order.shape, states.shape[3])) for states in (keys, values)]
    slots = [states.masked_fill(free[..., None], 1e3) for states in slots]
    positions = order.masked_fill(free, -1).int()
    allowed = torch.zeros(B, H, L, dtype=torch.bool).scatter(2, order, ~free)

    weights = plain(query, keys, mask, kind == "causal", allowed)
    call = AttentionCall(query, mask, is_causal=kind == "causal")
    tiles = list(attend_and_weigh(call, *slots, L, positions))
    output, seen = (torch.cat(parts, dim=2) for parts in list(zip(*tiles, strict=True))[1:])
    assert torch.allclose(output, weights @ values.repeat_interleave(G, dim=1), atol=1e-5)
    by_position = weights.unflatten(1, (H, G)).sum(dim=2)
    index = order[:, :, None].expand(B, H, Q, -1)
    assert torch.allclose(seen, by_position.gather(3, index), atol=1e-5)
