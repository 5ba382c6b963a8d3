"""Steps of static layers by Triton's kernels: right in its interpreter or on a GPU, and the same launches every time.

Under a stand-in for a GPU's driver every step has the same operations, shapes, launches and arguments, reads nothing
from the device and compiles nothing: a CUDA graph replays one of them. That runs in a process of its own, as Triton
decides when it is imported if it interprets.
"""

import copy
import os
import sys
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from stand_in import make_model
from torch.utils._python_dispatch import TorchDispatchMode

from kvcache_plugins import TransformCodingCache
from kvcache_plugins.eval.kernel_check import plain_pytorch
from kvcache_plugins.kernels import triton
from kvcache_plugins.kernels.attention import attend
from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.layers.device_plan import count_tokens
from kvcache_plugins.layers.static_layer import static_attention
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.transform_coding.calibration import calibrate_transform


# Triton reads the variable when it is imported, which is before this file is
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
needs_kernels = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRETED, reason="kernels need a GPU or TRITON_INTERPRET=1 in the environment"
)
# Relative RMS error, float32
TOLERANCE = 1e-5
# Options of the cache, padding, head dim, and True for calibrated bases
CASES = {
    "alone": ({"residual_length": 4, "recent_length": 12}, [0], 16, False),
    "padded": ({"residual_length": 4, "recent_length": 6, "nbits": 2}, [3, 0], 16, False),
    # Only older rows; means of values
    "wide": ({"residual_length": 37, "recent_length": 0}, [0], 48, False),
    "calibrated": ({"residual_length": 4, "recent_length": 12, "nbits": 2.25}, [0], 16, True),
    # Rows of the prompt that a copy of the cache shares, behind them rows of its own
    "forked": ({"residual_length": 4, "recent_length": 12}, [0], 16, False),
}
NUM_PROMPT, NUM_DECODED, ROOM = 75, 21, 700
READING = {"_local_scalar_dense", "item", "nonzero", "equal", "_to_cpu"}


def make_cache(model, is_calibrated, **options):
    if is_calibrated:
        options["calibration"] = calibrate_transform(model, [torch.arange(200) % 32], num_draws=1)
    return TransformCodingCache(model, max_cache_len=ROOM, **options)


@pytest.fixture
def decoded(monkeypatch):
    """Make a layer of a case that has stored a prompt and decoded tokens, and a mask of its tokens but padding."""

    def make(case, num_decoded=NUM_DECODED):
        options, padding, head_dim, is_calibrated = CASES[case]
        model = make_model(head_dim, 1 + is_calibrated).to(DEVICE)
        monkeypatch.setattr("kvcache_plugins.codecs.prompt_codec._STEADY_VALUES", 2 * (case == "wide"))
        cache = make_cache(model, is_calibrated, **options)
        torch.manual_seed(0)
        ids = torch.randint(32, (len(padding), NUM_PROMPT + num_decoded), device=DEVICE)
        seen = torch.arange(ids.shape[1], device=DEVICE) >= torch.tensor(padding, device=DEVICE)[:, None]
        for first, stop in [(0, NUM_PROMPT), *((place, place + 1) for place in range(NUM_PROMPT, ids.shape[1]))]:
            # Encoding a prompt takes Triton's interpreter longest, and is tested elsewhere
            monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "triton" if first or DEVICE == "cuda" else "torch")
            mask = seen[:, :stop].long() if any(padding) else None
            with torch.no_grad():
                model(ids[:, first:stop], attention_mask=mask, **as_argument(cache))
            if case == "forked" and stop == NUM_PROMPT + 1:
                (cache,) = cache.fork(1)
            if not first:
                # Prepared for PyTorch
                for layer in cache.layers:
                    layer.invalidate_plan()
        monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "triton")
        return cache, seen

    return make


def require_close(output, expected):
    error = (output - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < TOLERANCE, error


ALL_CASES = ["padded", *(pytest.param(case, marks=pytest.mark.long) for case in CASES if case != "padded")]


@needs_kernels
@pytest.mark.parametrize("case", ALL_CASES)
def test_attention_equals_pytorch(case, decoded):
    cache, seen = decoded(case)
    layer = cache.layers[0]
    assert layer._pushes_on_device and layer.stats()["tokens_compressed"] > 0
    assert case != "wide" or layer.codec.formats()[1].mean is not None
    query = torch.randn(len(seen), 4, 1, CASES[case][2], device=DEVICE)
    outputs = [layer.plan.attend(query, None, layer.storage.tail) for _ in range(2)]
    hidden = torch.rand(len(query), 1, 1, layer.graph.num_columns, device=DEVICE) < 0.3
    hidden[..., : seen.shape[1]] |= ~seen[:, None, None]
    masked = attend(query, layer.plan.parts(~hidden), 2, None, "triton")
    with plain_pytorch():
        for output in outputs:
            require_close(output, layer.attend(AttentionCall(query, seen[:, None, None])))
        require_close(masked, layer.attend(AttentionCall(query, ~hidden[..., : seen.shape[1]])))
    # The host writes the counters after a rollback
    cache.crop(-1)
    output = layer.plan.attend(query, None, layer.storage.tail)
    with plain_pytorch():
        require_close(output, layer.attend(AttentionCall(query, seen[:, None, None, :-1])))


@needs_kernels
@pytest.mark.parametrize("case", ALL_CASES)
def test_rows_equal_plain_pytorch(case, decoded, monkeypatch):
    """Rows, exact tokens and counters after pushes on the device, and those of a layer that PyTorch packs."""
    # A fork has a plan once it has attended
    cache, _ = decoded(case, num_decoded=2 if case == "forked" else 1)
    layer = cache.layers[0]
    own = copy.deepcopy(cache).layers[0]
    own.max_length = None
    own._is_static = False
    for number in range(40):
        states = torch.randn(2, *layer.storage.tail.storage[0].shape[:2], 1, CASES[case][2], device=DEVICE)
        layer.update(*states)
        with plain_pytorch():
            own.update(*states)
        counts = layer.plan.counts()
        assert counts == count_tokens(layer.storage, layer._length), number
        assert counts.total == layer._length == own._length
        assert torch.equal(layer.storage.tail.keys, own.storage.tail.keys)
        assert torch.equal(layer.storage.tail.values, own.storage.tail.values)
        num_rows, num_different = count_different_rows(layer, own)
        # A row may differ where a number lies at a bound
        assert num_different <= num_rows // 100


def held_segments(layer):
    return [segment for segment in layer.storage.segments if segment.length]


def count_different_rows(layer, other):
    """Rows of two layers that hold as many tokens in the same form, and rows that differ."""
    num_rows, num_different = 0, 0
    for mine, theirs in zip(held_segments(layer), held_segments(other), strict=True):
        assert (mine.start, mine.length, mine.is_recent) == (theirs.start, theirs.length, theirs.is_recent)
        for rows, expected in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            is_different = (rows[:, :, : mine.length] != expected[:, :, : mine.length]).any(dim=-1)
            num_different += int(is_different.sum())
            num_rows += is_different.numel()
    return num_rows, num_different


@needs_kernels
def test_fork_and_original_write_to_storage_of_their_own(decoded):
    cache, _ = decoded("alone", num_decoded=7)
    (fork,) = cache.fork(1)
    layers = [each.layers[0] for each in (cache, fork)]
    expected = [copy.deepcopy(each) for each in layers]
    for layer, own in zip(layers, expected, strict=True):
        layer._prepare_steps()
        assert layer._pushes_on_device
        # Enough to requantize recent rows, and move the others
        for _ in range(18):
            states = torch.randn(2, 1, 2, 1, 16, device=DEVICE)
            layer.update(*states)
            with plain_pytorch():
                own.update(*states)
    for layer, own in zip(layers, expected, strict=True):
        assert torch.equal(layer.storage.tail.keys, own.storage.tail.keys)
        _, num_different = count_different_rows(layer, own)
        # A row may differ where a number lies at a bound
        assert num_different <= 2


@needs_kernels
@pytest.mark.parametrize("is_reserved", [False, True])
def test_codec_is_fitted_again_by_the_host_where_no_graph_replays_steps(is_reserved, decoded, monkeypatch):
    """Reserved capacity is for graphs, whose codec decoded tokens do not change."""
    cache, _ = decoded("alone", num_decoded=1)
    layer = cache.layers[0]
    if not is_reserved:
        layer.max_length = layer.graph = None
    layer.policy = replace(layer.policy, num_recorded_queries=4)
    monkeypatch.setattr("kvcache_plugins.layers.row_layer._FIT_GROWTH", 1.1)
    pushed = []
    for _ in range(14):
        states = torch.randn(2, 1, 2, 1, 16, device=DEVICE)
        layer.update(*states)
        pushed.append(layer._pushes_on_device)
        layer.attend(AttentionCall(torch.randn(1, 2, 1, 16, device=DEVICE), None))
    fitted = layer.codec.fitted_length
    assert fitted == NUM_PROMPT if is_reserved else fitted in range(83, 83 + layer.policy.residual_length)
    # The host steps alone while queries are recorded, and the device again behind the new codec
    assert pushed[0] and pushed[-1] and all(pushed) == is_reserved
    older = layer.storage.segments[0]
    assert (older.codec is None) == is_reserved
    query = torch.randn(1, 2, 1, 16, device=DEVICE)
    output = layer.attend(AttentionCall(query, None))
    with plain_pytorch():
        expected = attend(query, list(layer._parts(None)), 2, None, "torch")
    require_close(output, expected)


@needs_kernels
def test_a_step_leaves_no_memory_allocated(monkeypatch):
    """The first may be recorded as a CUDA graph, whose memory it would be of."""
    model = make_model(16, 1).to(DEVICE)
    cache = make_cache(model, False, residual_length=4, recent_length=12)
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "triton")
    held = (triton._angles_of, triton.codebook_of, triton.signs_of)
    for each in held:
        each.cache_clear()
    with torch.no_grad():
        model(torch.randint(32, (1, NUM_PROMPT), device=DEVICE), **as_argument(cache))
    (layer,) = cache.layers
    layer.commit_prompt()
    assert layer._pushes_on_device
    made = [each.cache_info().misses for each in held]
    layer.plan.push_uncounted(*torch.randn(2, 1, 2, 1, 16, device=DEVICE))
    attend(torch.randn(1, 4, 1, 16, device=DEVICE), layer.plan.parts(None), 2, None, "triton")
    assert [each.cache_info().misses for each in held] == made


@needs_kernels
@pytest.mark.parametrize(
    "change",
    [
        lambda cache: cache.reorder_cache(torch.zeros(2, dtype=torch.int64, device=DEVICE)),
        lambda cache: cache.layers[0].offload(),
        lambda cache: cache.fork(1),
    ],
    ids=["reorder", "offload", "fork"],
)
def test_tokens_of_replayed_steps_are_counted_before_storage_moves(decoded, change):
    cache, _ = decoded("alone", 2)
    layer = cache.layers[0]
    states = torch.randn(2, 1, 2, 1, 16, device=DEVICE)
    query = torch.randn(1, 4, 1, 16, device=DEVICE)
    static_attention(query, *states, None, layer.graph.order, layer.graph.number, None)
    change(cache)
    assert layer.get_seq_length() == NUM_PROMPT + 3
    assert torch.equal(layer.to_dense("values")[:1, :, -1:].cpu(), states[1].cpu())


def describe(value):
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    return [describe(each) for each in value] if isinstance(value, list | tuple) else value


class Recorded(TorchDispatchMode):
    """Operations with the shapes of what they are given."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations.append((func.overloadpacket.__name__, describe(args)))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def check(name, num_steps):
    """Writes how many launches and operations a step of a layer has."""
    import stand_in

    from kvcache_plugins.triton_kernels.attention.combine import combine_kernel
    from kvcache_plugins.triton_kernels.transform_coding.attend_kernel import attend_kernel
    from kvcache_plugins.triton_kernels.transform_coding.code_rows import code_rows_kernel
    from kvcache_plugins.triton_kernels.transform_coding.push import push_kernel
    from kvcache_plugins.triton_kernels.transform_coding.step_kernel import step_kernel

    used = (attend_kernel, combine_kernel, code_rows_kernel, push_kernel, step_kernel)
    kernels = {each.fn.__name__: each for each in used}
    options, padding, _, is_calibrated = CASES[name]
    model, launches, steps, compiled = make_model(64, 2, torch.bfloat16), [], [], []
    cache = make_cache(model, is_calibrated, **options)
    # Inputs and allocations of a step; in bases outputs are turned back between the launches
    own = ("query", "result", "new_", *(["output"] if is_calibrated else []))

    def run(self, *arguments):
        # The launcher is given some things before the kernel's own arguments, a kept launch none
        names = [parameter.name for parameter in kernels[self._name].params]
        given = {
            argument: value.data_ptr() if isinstance(value, torch.Tensor) else value
            for argument, value in zip(names, arguments[-len(names) :], strict=True)
            if not (argument.endswith("_ptr") and argument.startswith(own))
        }
        launches.append((self._name, given))

    def attend_to(count):
        for index in range(2):
            states = torch.zeros(len(padding), 2, count, 64, dtype=torch.bfloat16)
            keys, values = cache.update(states, states, index)
            query = states.new_zeros(len(padding), 4, count, 64)
            torch.nn.functional.scaled_dot_product_attention(query, keys, values, is_causal=count > 1, enable_gqa=True)

    with stand_in.stand_in_driver() as driver, patch.object(stand_in._Kernel, "run", run):
        attend_to(100)
        if name == "forked":
            attend_to(1)
            (cache,) = cache.fork(1)
            attend_to(1)
        for _ in range(num_steps):
            launches.clear()
            with Recorded() as mode:
                attend_to(1)
            steps.append((list(launches), mode.operations))
            compiled.append(len(driver.compilations))
        # After several tokens, some of them taken back, single ones are pushed again
        attend_to(7)
        cache.crop(-2)
        attend_to(1)
        attend_to(1)
        assert all(layer._pushes_on_device for layer in cache.layers)
    first_launches, first_operations = steps[1]
    # Rows in bases, and of three segments, are a launch each, and another merges
    parts = 1 + bool(options["recent_length"]) + (name == "forked")
    apart = [*parts * ["attend_kernel"], "combine_kernel"]
    names = ["push_kernel", *(apart if is_calibrated or name == "forked" else ["step_kernel"])]
    assert [kernel for kernel, _ in first_launches] == 2 * names
    assert len({*compiled}) == 1, compiled
    # All that stays is written by kernels, whose arguments are the same
    assert not any(name.endswith("_") for name, _ in first_operations), first_operations
    reading = [bool(READING & {name for name, _ in operations}) for _, operations in steps[1:]]
    for is_reading, (own_launches, operations) in zip(reading, steps[1:], strict=True):
        assert own_launches == first_launches
        assert is_reading or operations == first_operations
    # Now and then the host asks whether all tokens could be coded
    assert sum(reading) <= num_steps // 64 + 1, reading
    sys.stdout.write(f"{name}: {len(first_launches) // 2} launches, {len(first_operations) // 2} operations a layer\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_steps"),
    [
        ("alone", "500"),
        ("forked", "20"),
        *(pytest.param(name, "40", marks=pytest.mark.long) for name in ("padded", "wide", "calibrated")),
    ],
)
def test_every_step_repeats_the_launches_of_the_first(name, num_steps, run_compiling):
    run_compiling(name, num_steps)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("batch_size", [1, 2])
def test_generate_replays_cuda_graphs(batch_size):
    model = make_model(64, 2).to(DEVICE)
    ids = torch.randint(32, (batch_size, 131), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, : 5 * (batch_size - 1)] = 0
    call = {"attention_mask": mask, "max_new_tokens": 140, "do_sample": False}
    caches = [TransformCodingCache(model, max_cache_len=300) for _ in range(2)]
    expected = model.generate(ids, **call, **as_argument(caches[0]), disable_compile=True)
    assert torch.equal(model.generate(ids, **call, **as_argument(caches[1])), expected)
    assert caches[1].stats() == caches[0].stats()


if __name__ == "__main__":
    torch.set_num_threads(1)
    check(sys.argv[1], int(sys.argv[2]))
