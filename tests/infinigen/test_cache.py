"""InfiniGen on tiny random models: exact where everything is fetched, right about what it does elsewhere; with a
codec in its pool, what it attends to and costs; and the devices on which it speculates by default.
"""

import copy
import gc
import inspect
import resource
import warnings
from dataclasses import fields
from typing import Any

import pytest
import torch
from decoding import EVERYTHING, TENTH, assert_same, decode_logits, make_model, tokens
from transformers import DynamicCache, PreTrainedModel

from kvcache_plugins import InfiniGenCache, InfiniGenTransformCache, create_cache
from kvcache_plugins.eval.observers import HitCounter
from kvcache_plugins.eval.tiny_models import build_family
from kvcache_plugins.infinigen.config import InfiniGenConfig
from kvcache_plugins.infinigen.hooks import hooks_of
from kvcache_plugins.infinigen.pool import PAGE_TOKENS, TokenPool


# One of each way to make queries; `tests/eval/test_families.py` fetches all tokens of every family
FAMILIES = ("llama", "qwen3", "gemma3_text", "phi3", "opt", "gpt_neox", "gpt2")


@pytest.mark.parametrize("cache_class", [InfiniGenCache, InfiniGenTransformCache])
def test_options_have_the_defaults_of_the_config(cache_class) -> None:
    parameters = inspect.signature(cache_class).parameters
    defaults = {each.name: each.default for each in fields(InfiniGenConfig)}
    named = {name: parameter.default for name, parameter in parameters.items() if name in defaults}
    assert named == {name: default for name, default in defaults.items() if name in named}
    left_out = {"scoring_nbits", "partial_ratio", "skewing"} if cache_class is InfiniGenTransformCache else set()
    assert defaults.keys() - named.keys() == left_out


@pytest.mark.parametrize("name", FAMILIES)
def test_predicted_queries_select_the_tokens_of_true_ones(name: str) -> None:
    """A stack whose layers change little: expected queries are near the true ones, so the same tokens are chosen."""
    model, prompt, steps = build_family(name), tokens(300).clamp(max=90), tokens(8, seed=1).clamp(max=90)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if any(part in parameter_name for part in ("o_proj", "out_proj", "down_proj", "c_proj", "dense", "fc2")):
                parameter.mul_(0.02)
            # Gemma 3 norms a block's output, whatever its size
            if name == "gemma3_text" and "post_" in parameter_name:
                parameter.fill_(-0.98)
    with InfiniGenCache(model, **TENTH, full_layers=(0,), speculate=True) as cache:
        counter = HitCounter(cache)
        decode_logits(model, cache, prompt, steps)
    stats = cache.stats()
    assert stats["speculated_calls"] == stats["selected_calls"] > 0
    assert counter.hits > 0.8 * counter.possible
    # Chosen at random, a tenth of the tokens would be right
    assert counter.possible == stats["tokens_fetched"]


@pytest.mark.parametrize("rule", [{"min_weight": 1.0}, {"alpha": 3.0}, TENTH], ids=str)
def test_rules_fetch_few_tokens_near_dense_logits(llama: PreTrainedModel, rule: dict[str, float]) -> None:
    prompt, steps = tokens(400), tokens(10, seed=1)
    expected = decode_logits(llama, DynamicCache(config=llama.config), prompt, steps)
    errors = {}
    for speculate in (True, False):
        with InfiniGenCache(llama, **rule, full_layers=(0,), speculate=speculate) as cache:
            logits = decode_logits(llama, cache, prompt, steps)
        stats = cache.stats()
        assert 0.01 < stats["tokens_fetched"] / stats["tokens_fetchable"] <= 0.2
        assert (stats["speculated_calls"] > 0) is speculate
        errors[speculate] = ((logits - expected).norm() / expected.norm()).item()
    assert errors[False] < 0.4


def test_several_new_tokens_attend_to_everything(llama: PreTrainedModel) -> None:
    """A second turn is exact attention over the pool, whatever the rule."""
    prompt, turn = tokens(200), tokens(30, seed=1)
    with InfiniGenCache(llama, max_fetch_ratio=0.01, full_layers=()) as cache, torch.no_grad():
        llama(prompt, past_key_values=cache)
        logits = llama(turn, past_key_values=cache).logits
    expected = llama(torch.cat([prompt, turn], dim=1)).logits[:, 200:]
    assert_same(logits, expected)
    assert cache.stats()["exact_calls"] == 3


def test_memory_counts_every_stored_tensor(llama: PreTrainedModel) -> None:
    with InfiniGenCache(llama) as cache:
        decode_logits(llama, cache, tokens(300), tokens(2, seed=1))
    parts = cache.memory().parts
    # One of three layers is offloaded: 268 tokens of 300 went into the pool, keys and values of 2 heads of 16
    assert parts["pool"] == 268 * 2 * 2 * 16 * 4
    # Half a byte a number and a float16 a token; mean and spread of every channel
    assert parts["scoring"] == 268 * 2 * (16 // 2 + 2) + 2 * 2 * 16 * 4
    assert parts["dense"] == 2 * 302 * 2 * 2 * 16 * 4


def test_detached_cache_still_generates(llama: PreTrainedModel) -> None:
    prompt, steps = tokens(300), tokens(4, seed=1)
    cache = InfiniGenCache(llama, full_layers=(), speculate=True)
    decode_logits(llama, cache, prompt, steps)
    speculated = cache.stats()["speculated_calls"]
    assert speculated > 0
    cache.detach()
    # Hooks of another cache make no difference
    with torch.no_grad(), InfiniGenCache(llama):
        with pytest.warns(UserWarning, match=r"used after `detach\(\)`, or after the end of its `with` block"):
            assert llama(steps[:, :1], past_key_values=cache).logits.isfinite().all()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "`past_key_values` is deprecated")
            llama(steps[:, :1], past_key_values=cache)
    stats = cache.stats()
    assert (stats["speculated_calls"], stats["selected_calls"]) == (speculated, 6 * 3)


def test_no_warning_after_hooks_that_were_never_used(llama: PreTrainedModel) -> None:
    with InfiniGenCache(llama, speculate=False) as cache, torch.no_grad():
        llama(tokens(100), past_key_values=cache)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "`past_key_values` is deprecated")
        decode_logits(llama, cache, tokens(1), tokens(2))


def test_a_copy_outlives_its_original(llama: PreTrainedModel) -> None:
    prompt, steps = tokens(300), tokens(4, seed=1)
    cache = InfiniGenCache(llama, full_layers=(), speculate=True)
    with torch.no_grad():
        llama(prompt, past_key_values=cache)
    other = copy.deepcopy(cache)
    expected = decode_logits(llama, cache, steps[:, :1], steps[:, 1:])
    del cache
    gc.collect()
    assert torch.equal(decode_logits(llama, other, steps[:, :1], steps[:, 1:]), expected)
    assert other.stats()["speculated_calls"] > 0
    del other
    gc.collect()
    assert hooks_of(llama) is None


def test_a_copied_model_has_hooks_of_its_own() -> None:
    model, prompt, steps = make_model(), tokens(300), tokens(4, seed=1)
    cache = InfiniGenCache(model, full_layers=(), speculate=True)
    expected = decode_logits(model, cache, prompt, steps)

    def num_caches() -> int:
        gc.collect()
        return sum(isinstance(each, InfiniGenCache) for each in gc.get_objects())

    before = num_caches()
    copied = copy.deepcopy(model)
    assert num_caches() == before
    own = InfiniGenCache(copied, full_layers=(), speculate=True)
    assert torch.equal(decode_logits(copied, own, prompt, steps), expected)
    assert own.stats() == cache.stats()


def test_hooks_are_shared_and_removed() -> None:
    model = make_model()

    def num_hooks() -> int:
        return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())

    # On a CPU nothing is speculated
    plain = InfiniGenCache(model)
    assert num_hooks() == 0
    first, second = (InfiniGenCache(model, speculate=True) for _ in range(2))
    attached = num_hooks()
    InfiniGenCache(model, speculate=True)
    assert num_hooks() == attached > 0
    gc.collect()
    first.detach()
    plain.detach()
    assert num_hooks() == attached
    second.detach()
    assert num_hooks() == 0


@pytest.mark.parametrize("speculate", [True, False], ids=["speculated", "own query"])
@pytest.mark.parametrize("options", [{"max_fetch_ratio": 0.05}, {"min_weight": 0.5}, {"partial_ratio": 0.5}], ids=str)
def test_eager_attention_chooses_the_tokens_of_sdpa(options: dict[str, Any], speculate: bool) -> None:
    model, prompt, steps = make_model(), tokens(200), tokens(4, seed=1)
    logits, stats = [], []
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        with InfiniGenCache(model, full_layers=(), speculate=speculate, **options) as cache:
            logits.append(decode_logits(model, cache, prompt, steps))
        stats.append(cache.stats())
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
    names = "selected_calls", "exact_calls", "tokens_fetched", "speculated_calls", "dense_reads"
    assert [stats[0][name] for name in names] == [stats[1][name] for name in names]
    assert 0 < stats[1]["tokens_fetched"] < stats[1]["tokens_fetchable"]
    assert stats[1]["dense_reads"] == stats[1]["exact_calls"] == 0


def test_latent_attention_is_exact() -> None:
    model = build_family("deepseek_v3")
    prompt, steps = tokens(100).clamp(max=90), tokens(4, seed=1).clamp(max=90)
    with pytest.warns(UserWarning, match="multi-head latent attention"):
        cache = InfiniGenCache(model, max_fetch_ratio=0.05, full_layers=(), speculate=True)
    with pytest.warns(UserWarning, match="the whole cache is fetched"):
        logits = decode_logits(model, cache, prompt, steps)
    expected = decode_logits(model, DynamicCache(config=model.config), prompt, steps)
    assert_same(logits, expected)
    assert cache.stats()["exact_calls"] > 0
    assert cache.stats()["dense_reads"] == 0


def test_exhausted_host_memory_raises_and_keeps_the_pool() -> None:
    small = torch.randn(64, 16, 8, 128)
    pool = TokenPool((small, small))
    pool.append((small, small), None)
    held = [page.clone() for page in pool.pages]
    many = small[:, :, :1].expand(-1, -1, 3 * PAGE_TOKENS, -1)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, limits[1]))
    try:
        with pytest.raises(MemoryError, match=r"8 are held and usable. With `pool_tokens`"):
            pool.append((many, many), None)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert pool.num_slots == 8
    assert all(torch.equal(page, before) for page, before in zip(pool.pages, held, strict=True))


@torch.no_grad()
def logits(model: PreTrainedModel, cache: InfiniGenCache, input_ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids, past_key_values=cache).logits[:, -1]


def assert_refused(model: PreTrainedModel, cache: InfiniGenCache, count: int) -> None:
    before = cache.get_seq_length()
    with pytest.raises(ValueError, match="made for another model than the one"):
        logits(model, cache, tokens(count))
    assert cache.get_seq_length() == before


@pytest.mark.parametrize(("is_detached", "other_has_hooks"), [(False, False), (False, True), (True, True)], ids=str)
def test_another_model_is_refused(tiny_model, is_detached: bool, other_has_hooks: bool) -> None:
    """Models of the same shapes: hooks of either one show whose forward it is."""
    options = {"full_layers": (), "speculate": True}
    own, other = (tiny_model("llama", seed=seed) for seed in (1, 2))
    cache, expected = (InfiniGenCache(own, **options) for _ in range(2))
    others = [InfiniGenCache(other, **options)] if other_has_hooks else []
    for each in (cache, expected):
        logits(own, each, tokens(150))
        if is_detached:
            each.detach()
    for _ in range(2):
        assert_refused(other, cache, 1)
        torch.testing.assert_close(logits(own, cache, tokens(1)), logits(own, expected, tokens(1)))
    assert cache.get_seq_length() == 152
    cache.reset()
    assert_refused(other, cache, 20)
    torch.testing.assert_close(logits(own, cache, tokens(20)), logits(own, InfiniGenCache(own, **options), tokens(20)))
    assert all(each.get_seq_length() == 0 for each in others)


@pytest.mark.parametrize("architecture", ["llama", "opt"])
def test_a_cache_whose_model_is_gone_is_refused(tiny_model, architecture: str) -> None:
    own, other = (tiny_model(architecture, seed=seed) for seed in (1, 2))
    cache = InfiniGenCache(own, full_layers=(), speculate=architecture == "llama")
    logits(own, cache, tokens(150))
    del own
    gc.collect()
    assert_refused(other, cache, 1)
    cache.reset()
    assert_refused(other, cache, 20)


@pytest.mark.each_value
@pytest.mark.parametrize("pool_tokens", [None, 150])
@pytest.mark.parametrize("architecture", ["llama", "llama-mha", "llama-mqa", "gemma3-hybrid"])
def test_fetching_everything_equals_attention_over_all_codes(architecture, pool_tokens, tiny_model) -> None:
    """Single tokens, which choose, against the same tokens at once, which attend to everything page by page."""
    model = tiny_model(architecture)
    prompt, steps = tokens(330, 2), tokens(9, 2, seed=1)
    with InfiniGenTransformCache(model, pool_tokens=pool_tokens, **EVERYTHING) as cache:
        chosen = decode_logits(model, cache, prompt, steps)
    assert (cache.stats()["tokens_evicted"] > 0) is (pool_tokens is not None)
    with InfiniGenTransformCache(model, pool_tokens=pool_tokens, **EVERYTHING) as cache, torch.no_grad():
        model(prompt, past_key_values=cache)
        expected = model(steps, past_key_values=cache).logits
    assert cache.stats()["exact_calls"]
    assert_same(chosen[:, 1:], expected, 2e-3)


def test_logits_with_eight_bits_are_nearly_dense(tiny_model) -> None:
    model, prompt, steps = tiny_model("llama"), tokens(330, 2), tokens(80, 2, seed=1)
    expected = decode_logits(model, DynamicCache(config=model.config), prompt, steps)
    errors = []
    for nbits in (8, 4, 2):
        with InfiniGenTransformCache(model, key_nbits=nbits, value_nbits=nbits, **EVERYTHING) as cache:
            errors.append((decode_logits(model, cache, prompt, steps) - expected).abs().max().item())
    assert errors[0] < 0.05 * errors[2] and errors == sorted(errors)
    # Decoded tokens have moved on into rows too
    assert cache.layers[0].pool.num_slots == 330 - 32 + 64


def test_coded_rows_fetch_a_fraction_of_dense_bytes(tiny_model) -> None:
    model, prompt, steps = tiny_model("llama"), tokens(900), tokens(4, seed=1)
    options = {**TENTH, "full_layers": ()}
    caches = [InfiniGenCache(model, **options), InfiniGenTransformCache(model, **options)]
    for cache in caches:
        decode_logits(model, cache, prompt, steps)
    plain, coded = (cache.stats() for cache in caches)
    assert plain["tokens_fetched"] == coded["tokens_fetched"]
    # 13 bytes of codes and a scale, instead of 64 numbers in float32
    assert coded["bytes_fetched"] / plain["bytes_fetched"] == 14 / 256
    assert caches[1].memory().total_bytes < caches[0].memory().total_bytes / 5


@pytest.mark.parametrize("length, padding", [(75, 8), (64, 1), (130, 66), (150, 81)])
def test_padded_sequence_equals_itself_alone(length, padding, tiny_model) -> None:
    """The host reserves room for the longest sequence, but fewer tokens are real."""
    model, prompt, steps = tiny_model("llama"), tokens(length), tokens(4, seed=1)
    mask = (torch.arange(length) >= padding).long()[None]
    with InfiniGenTransformCache(model, **EVERYTHING) as cache:
        logits = decode_logits(model, cache, prompt, steps, mask)
    with InfiniGenTransformCache(model, **EVERYTHING) as cache:
        assert_same(logits, decode_logits(model, cache, prompt[:, padding:], steps), 1e-3)


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_speculates_on_accelerators_by_default(device: str) -> None:
    where = torch.device(device)
    assert InfiniGenConfig().speculates_on(where) is (device != "cpu")
    for asked in (True, False):
        assert InfiniGenConfig(speculate=asked).speculates_on(where) is asked


@torch.no_grad()
def test_cpu_layers_select_by_their_own_query(tiny_llama) -> None:
    prompt = torch.randint(3, 128, (1, 200), generator=torch.Generator().manual_seed(0))
    counts = {}
    for name, options in {"default": {}, "asked": {"speculate": True}}.items():
        with InfiniGenCache(tiny_llama, full_layers=(0,), **options) as cache:
            tiny_llama(prompt, past_key_values=cache)
            for _ in range(3):
                tiny_llama(prompt[:, :1], past_key_values=cache)
            stats = cache.stats()
            own, ahead = stats["layers_by_own_query"], stats["layers_speculating"]
        assert stats["selected_calls"] == 3 * stats["layers_offloaded"]
        counts[name] = (own > 0, ahead > 0, stats["speculated_calls"] > 0)
    assert counts == {"default": (True, False, False), "asked": (False, True, True)}


def test_options_of_the_paper_speculate_on_every_device(tiny_llama) -> None:
    with create_cache("infinigen-paper", tiny_llama) as cache:
        assert cache.infinigen_config.speculate
