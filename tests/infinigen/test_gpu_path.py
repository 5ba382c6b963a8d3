"""A layer on a GPU attends as on a CPU, in the right order, and the host waits for no result. Rows are read after
their transfer to the GPU, and their memory is freed after that.

Stand-ins of `conftest.py` take the place of a GPU. Tensors on the `meta` device stand for results that a host does not
know: they have shapes and no numbers, and reading one raises, where a GPU would be waited for.
"""

import copy
import pickle
import weakref

import pytest
import torch
from decoding import EVERYTHING, GROUPED, TENTH, assert_same, decode_logits, tokens
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from kvcache_plugins import InfiniGenCache, InfiniGenTransformCache
from kvcache_plugins.eval.observers import TransferTimes
from kvcache_plugins.formats.hadamard import hadamard_matrix
from kvcache_plugins.infinigen import layer as layers
from kvcache_plugins.infinigen import staging
from kvcache_plugins.infinigen.hooks import hooks_of
from kvcache_plugins.infinigen.pool import PAGE_TOKENS, TokenPool
from kvcache_plugins.kernels.selective_attention import Selection


@pytest.fixture(params=["triton", "torch"])
def gpu(cuda, request):
    """Transfers by kernel or by the host."""
    cuda.use_gpu_pools(request.param)
    return cuda


@pytest.fixture(scope="module")
def meta_llama():
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(LlamaConfig(**GROUPED)).eval()


class StagedNow:
    """Rows that are staged and not dropped yet, and the most bytes that they had."""

    def __init__(self):
        self.held, self.most = weakref.WeakSet(), 0

    def add(self, staged):
        if staged is not None:
            self.held.add(staged)
            self.most = max(self.most, sum(each._rows.nbytes for each in self.held))
        return staged


@pytest.fixture
def staged(monkeypatch):
    found, start = StagedNow(), staging.start_fetch
    monkeypatch.setattr(layers, "start_fetch", lambda *args: found.add(start(*args)))
    return found


class NothingComesFromTheHost(TorchDispatchMode):
    """Raise where a tensor of the host is used or copied: the host waits for a copy, unless memory is page-locked."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if any(each.device.type == "cpu" for each in given) and not kwargs.get("non_blocking"):
            raise AssertionError(f"{func} makes the host wait")
        return func(*args, **kwargs)


@pytest.mark.each_value
@pytest.mark.parametrize("pool_tokens", [None, 400])
@pytest.mark.parametrize("is_padded", [False, True], ids=["whole", "padded"])
def test_fetching_everything_is_exact(gpu, llama, is_padded, pool_tokens):
    prompt, steps, mask = tokens(90, rows=2), tokens(4, rows=2, seed=1), None
    if is_padded:
        mask = torch.ones_like(prompt)
        mask[0, :50] = 0
    with InfiniGenCache(llama, **EVERYTHING, pool_tokens=pool_tokens) as cache:
        logits = decode_logits(llama, cache, prompt, steps, mask)
    assert_same(logits, decode_logits(llama, DynamicCache(config=llama.config), prompt, steps, mask))


@pytest.mark.each_value
@pytest.mark.parametrize("kernel", ["triton", "torch"])
@pytest.mark.parametrize(
    ("make_cache", "rule"),
    [
        *((InfiniGenCache, rule) for rule in ({"min_weight": 1.0}, {"alpha": 3.0}, TENTH)),
        (InfiniGenTransformCache, TENTH),
    ],
)
def test_choices_and_counters_equal_those_of_a_cpu(cuda, llama, make_cache, rule, kernel):
    prompt, steps = tokens(150, rows=2), tokens(3, rows=2, seed=1)
    cuda.use_kernel("torch")
    with make_cache(llama, **rule) as cache:
        expected, stats = decode_logits(llama, cache, prompt, steps), cache.stats()
    cuda.use_gpu_pools(kernel)
    with make_cache(llama, **rule) as cache:
        assert_same(decode_logits(llama, cache, prompt, steps), expected)
        assert cache.stats() == stats


def test_choices_follow_tokens_that_move_into_the_pool(cuda, llama, monkeypatch):
    """Launches over rows are for those of the pool as it was."""
    monkeypatch.setattr(layers, "FLUSH_LENGTH", 2)
    logits, stats = [], []
    for use in (lambda: cuda.use_kernel("torch"), lambda: cuda.use_gpu_pools("triton")):
        use()
        with InfiniGenTransformCache(llama, **TENTH, recent=8) as cache:
            logits.append(decode_logits(llama, cache, tokens(90), tokens(4, seed=1)))
            stats.append(cache.stats())
    assert_same(*logits)
    assert stats[0] == stats[1] and stats[0]["tokens_pooled"] > 0


@pytest.mark.parametrize(
    "options",
    [{"speculate": True}, {"speculate": False}, {"speculate": True, "max_fetch_ratio": 0.5, "full_layers": (2,)}],
    ids=str,
)
def test_memory_report_predicts_staging(cuda, meta_llama, llama, options, staged):
    expected = InfiniGenCache(meta_llama, **options)
    expected.detach()
    for index in range(3):
        states = torch.empty(2, 2, 153, 16, device="meta")
        expected.update(states, states, index)
    for layer in expected.layers:
        if isinstance(layer, layers.InfiniGenLayer):
            layer.commit_prompt()
    staging = expected.memory().parts["staging"]
    cuda.use_gpu_pools("triton")
    with InfiniGenCache(llama, **options) as cache:
        decode_logits(llama, cache, tokens(150, rows=2), tokens(3, rows=2, seed=1))
    assert cache.memory().parts["staging"] == staging
    # The next layer's rows are on their way while a layer attends to its own
    assert 0.95 * staging <= staged.most <= staging and not staged.held


def test_tokens_and_pages_are_written_without_waiting(gpu):
    """Whole pages, the rest of a prompt, runs of decoded tokens, and one that crosses into another page."""
    states = torch.randn(2, 2, 2 * PAGE_TOKENS + 60, 9, generator=torch.Generator().manual_seed(0))
    keys, values = states.split([5, 4], dim=3)
    pool, start = TokenPool((keys, values)), 0
    for count in (PAGE_TOKENS + 20, 32, 1, PAGE_TOKENS - 40, 47):
        stop = start + count
        pool.append((keys[:, :, start:stop], values[:, :, start:stop]), None)
        start = stop
    for number, expected in enumerate((keys, values)):
        parts = [rows.split([5, 4], dim=3)[number] for rows, *_ in pool.iter_pages()]
        assert torch.equal(torch.cat(parts, dim=2), expected)
    assert gpu.synchronized == []


def test_several_tokens_rollbacks_beams_and_copies_are_exact(gpu, llama):
    prompt, steps = tokens(90, rows=2), tokens(2, rows=2, seed=1)
    with InfiniGenCache(llama, **EVERYTHING) as cache, torch.no_grad():
        dense = DynamicCache(config=llama.config)
        for each in (cache, dense):
            decode_logits(llama, each, prompt, steps)
            llama(tokens(5, rows=2, seed=2), past_key_values=each)
            each.crop(-50)
            each.reorder_cache(torch.tensor([1, 1]))
        copied = copy.deepcopy(cache)
        expected = decode_logits(llama, dense, steps, steps)
        assert_same(decode_logits(llama, cache, steps, steps), expected)
        assert_same(decode_logits(llama, copied, steps, steps), expected)


@pytest.mark.parametrize("change", ["crop", "reorder", "reset", "move"])
def test_a_dropped_fetch_is_freed(cuda, llama, change, staged):
    cuda.use_gpu_pools("triton")
    with InfiniGenCache(llama, full_layers=()) as cache:
        decode_logits(llama, cache, tokens(100), tokens(1, seed=1))
        layer = cache.layers[1]
        layer.speculate(torch.randn(1, 4, 1, 16), None, 0.25)
        assert staged.held
        {
            "crop": lambda: layer.crop(-1),
            "reorder": lambda: layer.reorder_cache(torch.tensor([0])),
            "reset": layer.reset,
            "move": lambda: layer._move_to(torch.device("cpu")),
        }[change]()
    assert not staged.held


@pytest.mark.parametrize("use", ["gather", "map", "truncate", "copy", "drop"])
def test_the_host_waits_before_it_touches_pages(gpu, use):
    keys = torch.randn(1, 2, PAGE_TOKENS + 50, 8)
    pool = TokenPool((keys, keys))
    gpu.compute.do("states")
    pool.append((keys, keys), None)
    list(pool.iter_pages())
    assert gpu.synchronized == []
    pool = {
        "gather": lambda: pool.gather(torch.zeros(1, 2, 3, dtype=torch.int64)),
        "map": lambda: pool.map(torch.neg),
        "truncate": lambda: pool.truncate(60),
        "copy": lambda: copy.deepcopy(pool),
        "drop": lambda: None,
    }[use]()
    assert len(gpu.synchronized) == 1
    assert "states" in gpu.synchronized[0]


def test_pages_are_not_freed_while_rows_are_read_from_them(gpu, llama):
    with InfiniGenCache(llama, full_layers=()) as cache:
        decode_logits(llama, cache, tokens(100), tokens(1, seed=1))
    staging._stream_of(torch.device("cpu")).do("rows")
    by_kernel = cache.layers[0].pool.addresses_for(torch.empty(1)) is not None
    cache.layers[0].speculate(torch.randn(1, 4, 1, 16), None, 0.25)
    gpu.synchronized.clear()
    cache.reset()
    # The host has read the rows when it goes on
    assert any("rows" in past for past in gpu.synchronized) is by_kernel


@pytest.mark.each_value
@pytest.mark.parametrize("is_padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize(
    "options",
    [{"min_weight": 0.5}, {"alpha": 4.0}, {"partial_ratio": 0.3}, {"value_nbits": 4}],
    ids=lambda options: next(iter(options)),
)
@torch.no_grad()
def test_a_decode_step_reads_nothing_from_the_device(meta_llama, cuda, monkeypatch, options, is_padded):
    """A whole model without numbers; only transfers and the prompt's padding have stand-ins."""
    cuda.use_gpu_pools("torch")
    # A run of tokens moves into the pool among few steps
    monkeypatch.setattr(layers, "FLUSH_LENGTH", 4)
    monkeypatch.setattr(TokenPool, "addresses_for", lambda pool, states: torch.zeros(len(pool.pages)))
    monkeypatch.setattr(TokenPool, "_write", lambda *args: None)
    transfers = []
    monkeypatch.setattr(staging, "_gather", lambda *args: transfers.append(args))
    prompt, token = (torch.zeros(2, count, dtype=torch.int64, device="meta") for count in (100, 1))
    is_coded = "value_nbits" in options
    # Encoding a prompt makes it, but states without numbers are not encoded
    hadamard_matrix(meta_llama.config.head_dim, torch.device("meta"))
    with (InfiniGenTransformCache if is_coded else InfiniGenCache)(meta_llama, **options, full_layers=(0,)) as cache:
        # Queries are compared once a model, at a prompt
        hooks_of(meta_llama).checked.update(range(3))
        meta_llama(prompt, past_key_values=cache)
        if is_padded:
            for layer in cache.layers[1:]:
                layer.set_padding(torch.zeros(2, dtype=torch.int64, device="meta"))
                layer._left_padding._ends = 0, 7
                layer._left_padding._total = 7
        with NothingComesFromTheHost():
            for _ in range(6):
                meta_llama(token, past_key_values=cache)
    assert len(transfers) == 2 * 6
    assert cache.layers[1].pool.num_slots == 100 - 32 + 4
    with pytest.raises((RuntimeError, NotImplementedError)):
        cache.stats()


def make_pool(num_tokens=PAGE_TOKENS + 100, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(2, 3, num_tokens, dim, generator=generator).to(dtype) for dim in (8, 5)]
    pool = TokenPool(parts)
    pool.append(parts, None)
    return pool


def make_selection(pool, num_chosen, count=None, seed=1):
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(2, 3, pool.num_slots, generator=generator).argsort(dim=2)
    if count is None:
        count = torch.randint(0, num_chosen + 1, (2, 3), generator=generator)
        # One head with none, one with all
        count[0, 0], count[-1, -1] = 0, num_chosen
    return Selection(order[:, :, :num_chosen].contiguous(), count)


def start(pool, selection):
    return staging.start_fetch(pool, selection)


def test_transfers_run_after_the_selection_and_before_attention(cuda, transfers):
    pool = make_pool()
    for number in range(6):
        cuda.compute.do(f"write of the pool, choice {number}")
        staged = start(pool, make_selection(pool, 10, seed=number))
        assert f"write of the pool, choice {number}" in transfers[number]
        # The computing stream does not wait yet: the layer before computes
        assert f"transfer {number}" not in cuda.compute.do("layer before")
        staged.wait()
        assert f"transfer {number}" in cuda.compute.do(f"attention {number}")
    assert cuda.synchronized == []


@pytest.mark.parametrize("is_read", [False, True])
def test_memory_of_rows_is_recorded_on_the_computing_stream(cuda, transfers, is_read):
    """The next user of the memory comes after the transfer, and before the next one."""
    pool, other = make_pool(), cuda.Stream()
    staged = start(pool, make_selection(pool, 4))
    if is_read:
        with cuda.inside(other):
            place = staged.wait().data_ptr()
        assert "transfer 0" in other.past and (place, other) in cuda.recorded
    assert "transfer 0" not in cuda.compute.past
    del staged
    assert "transfer 0" in cuda.compute.do("who gets the memory")
    start(pool, make_selection(pool, 4))
    assert "who gets the memory" in transfers[1]


def test_memory_that_the_stream_uses_is_not_freed(cuda, transfers):
    """The allocator knows all memory that the second stream reads and others may free."""
    pool, selection = make_pool(), make_selection(make_pool(), 12)
    start(pool, selection)
    side = {place for place, stream in cuda.recorded if stream is not cuda.compute}
    assert {each.data_ptr() for each in (selection.slots, selection.count, pool.addresses_for(torch.empty(1)))} == side


def test_staged_rows_are_not_copied(transfers):
    pool = make_pool()
    staged = start(pool, make_selection(pool, 8))
    assert copy.deepcopy([staged]) == [None]
    assert pickle.loads(pickle.dumps([staged])) == [None]


def test_pages_of_a_copy_are_locked(cuda, transfers, monkeypatch):
    locked = set()
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.data_ptr() in locked)

    def pin_memory(tensor):
        result = tensor.clone()
        locked.add(result.data_ptr())
        return result

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    pool = copy.deepcopy(make_pool())
    assert {page.data_ptr() for page in pool.pages} <= locked
    selection = make_selection(pool, 8)
    rows, valid = start(pool, selection).wait(), selection.valid
    assert rows.shape == (*selection.slots.shape, pool.row_dim)
    assert torch.equal(rows[valid], pool.gather(selection.slots)[valid])


def test_transfers_are_timed_only_inside_the_block(transfers):
    pool = make_pool()
    with TransferTimes() as times:
        start(pool, make_selection(pool, 8)).wait()
    # A transfer is one operation, for which the computing stream had not waited
    assert times.seconds() == {"transfer_s": 1.0, "stalled_s": 1.0}
    start(pool, make_selection(pool, 8)).wait()
    assert times.seconds() == {"transfer_s": 1.0, "stalled_s": 1.0}
