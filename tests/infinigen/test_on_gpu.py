"""An InfiniGen cache on a real GPU: exact, and the host waits in no step."""

import copy

import pytest
import torch
from decoding import EVERYTHING, GROUPED, TENTH, assert_same, decode_logits, make_model, tokens
from transformers import DynamicCache, LlamaConfig

from kvcache_plugins import InfiniGenCache
from kvcache_plugins.eval.observers import TransferTimes
from kvcache_plugins.infinigen.pool import PAGE_TOKENS, TokenPool
from kvcache_plugins.infinigen.staging import start_fetch
from kvcache_plugins.kernels.selective_attention import Selection


pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
# Clock cycles, a tenth of a second or so: the host is far ahead of what it then asks for
_LONG = 200_000_000


@pytest.fixture(params=["triton", "torch"])
def kernel(monkeypatch, request):
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", request.param)
    return request.param


@pytest.fixture
def must_not_wait():
    """Raise where the host waits; used as a function, so that compilation may wait first."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(scope="module")
def llama():
    return make_model(LlamaConfig(**{**GROUPED, "hidden_size": 256})).to("cuda")


def make_tokens(count, rows=1, seed=0):
    return tokens(count, rows, seed).to("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rows_are_written_and_staged(kernel, must_not_wait, dtype):
    """Run twice: the host waits for compilation the first time."""
    states = torch.randn(2, 3, PAGE_TOKENS + 60, 48).to("cuda", dtype)
    keys, values = states.split([32, 16], dim=3)
    slots = torch.rand(2, 3, PAGE_TOKENS + 60, device="cuda").argsort(dim=2)[:, :, :129].contiguous()
    selection = Selection(slots, torch.randint(0, 130, (2, 3), device="cuda"))
    expected = states.gather(2, slots[..., None].expand(-1, -1, -1, 48))
    for attempt in range(2):
        pool = TokenPool((keys, values))
        # Pages are locked now: the driver may wait for that
        pool._grow(PAGE_TOKENS + 60)
        if attempt == 1 and kernel == "triton":
            must_not_wait()
        torch.cuda._sleep(_LONG)
        for start, stop in ((0, 1000), (1000, 1032), (1032, PAGE_TOKENS + 60)):
            pool.append((keys[:, :, start:stop], values[:, :, start:stop]), None)
        rows = start_fetch(pool, selection)
        staged = (pool.gather(slots) if rows is None else rows.wait()).clone()
    torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(staged[selection.valid], expected[selection.valid])
    assert torch.equal(torch.cat([rows[..., :32] for rows, *_ in pool.iter_pages()], dim=2), keys)
    pool.synchronize()
    assert torch.equal(torch.cat(pool.pages, dim=2)[:, :, : PAGE_TOKENS + 60], states.cpu())


@pytest.mark.parametrize("pool_tokens", [None, 400])
@pytest.mark.parametrize("is_padded", [False, True], ids=["whole", "padded"])
def test_fetching_everything_is_exact(kernel, llama, is_padded, pool_tokens):
    prompt, steps, mask = make_tokens(150, rows=2), make_tokens(40, rows=2, seed=1), None
    if is_padded:
        mask = torch.ones_like(prompt)
        mask[0, :70] = 0
    with InfiniGenCache(llama, **EVERYTHING, pool_tokens=pool_tokens) as cache:
        logits = decode_logits(llama, cache, prompt, steps, mask)
        copied = copy.deepcopy(cache)
        again = decode_logits(llama, cache, steps[:, :1], steps[:, 1:3])
        assert_same(decode_logits(llama, copied, steps[:, :1], steps[:, 1:3]), again, 1e-3)
    assert_same(logits, decode_logits(llama, DynamicCache(config=llama.config), prompt, steps, mask), 1e-3)


@pytest.mark.parametrize("rule", [{"min_weight": 0.5}, {"alpha": 4.0}, TENTH], ids=str)
@torch.no_grad()
def test_the_host_waits_in_no_step(llama, must_not_wait, rule):
    prompt, steps = make_tokens(600), make_tokens(80, seed=1)
    with InfiniGenCache(llama, **rule, full_layers=(0,)) as cache, TransferTimes() as times:
        decode_logits(llama, cache, prompt, steps[:, :40])
        must_not_wait()
        # A run of tokens moves into the pool among them
        for token in steps[:, 40:].split(1, dim=1):
            llama(token, past_key_values=cache)
        torch.cuda.set_sync_debug_mode("default")
    stats = cache.stats()
    assert stats["speculated_calls"] == stats["selected_calls"] == 2 * 80
    assert times.seconds()["transfer_s"] > 0


@torch.no_grad()
def test_a_cache_may_be_dropped_before_its_last_step_has_run(llama):
    prompt, steps = make_tokens(600), make_tokens(6, seed=1)
    expected = decode_logits(llama, DynamicCache(config=llama.config), prompt, steps)
    cache = InfiniGenCache(llama, **EVERYTHING)
    decode_logits(llama, cache, prompt, steps[:, :-1])
    torch.cuda._sleep(_LONG)
    logits = llama(steps[:, -1:], past_key_values=cache).logits[:, -1]
    pages = [(layer.pool.pages[0].shape, layer.pool.dtype) for layer in cache.layers]
    del cache
    # The next user of the pages' memory writes to it at once
    others = [torch.zeros(shape, dtype=dtype, pin_memory=True) for shape, dtype in pages]
    assert_same(logits, expected[:, -1], 1e-3)
    assert others
