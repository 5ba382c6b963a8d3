"""Steps of static layers of chunks by Triton's kernels: right in its interpreter or on a GPU, and always the same.

Under a stand-in for a GPU's driver ordinary steps and steps that pack a chunk have the same launches with the same
arguments, read nothing from the device and compile nothing: a CUDA graph replays one of them.
"""

import copy
import os
import sys
from unittest.mock import patch

import pytest
import torch
from stand_in import make_model
from test_static_steps import READING, Recorded, require_close

from kvcache_plugins import create_cache
from kvcache_plugins.eval.kernel_check import plain_pytorch
from kvcache_plugins.kernels.attention import attend
from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.layers.device_plan import count_tokens
from kvcache_plugins.models.cache_argument import as_argument


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
needs_kernels = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRETED, reason="kernels need a GPU or TRITON_INTERPRET=1 in the environment"
)
# Preset, further options, padding of each sequence, tokens of the prompt
CASES = {
    "gear-2bit": ("gear-2bit", {"sparsity": 0.15}, [3, 0], 75),
    "gear": ("gear", {"sparsity": 0.15}, [0], 75),
    "kivi-2bit": ("kivi-2bit", {}, [0], 75),
    "gear-k4v3": ("gear-k4v3", {}, [5, 0], 75),
    # The first chunk is of decoded tokens, and has sinks in it
    "short-prompt": ("gear-k4v3", {}, [2, 0], 11),
    # Chunks of decoded tokens that a copy of the cache shares, behind them chunks of its own
    "forked": ("gear-2bit", {}, [0], 75),
    # Without `max_cache_len` capacity grows, and another plan follows
    "growing": ("kivi-2bit", {}, [0], 75),
}
NUM_DECODED, ROOM, LENGTH = 37, 400, 16


@pytest.fixture
def decoded(monkeypatch):
    """Make a layer of a case that has stored a prompt and decoded tokens, and a mask of its tokens but padding."""

    def make(case, num_decoded=NUM_DECODED):
        preset, options, padding, num_prompt = CASES[case]
        model = make_model(16, 1).to(DEVICE)
        if case == "growing":
            monkeypatch.setattr("kvcache_plugins.gear.cache.has_gpu_kernels", lambda: True)
            monkeypatch.setattr("kvcache_plugins.layers.static_layer._LEAST", LENGTH)
        room = None if case == "growing" else ROOM
        cache = create_cache(preset, model, max_cache_len=room, residual_length=LENGTH, **options)
        torch.manual_seed(0)
        total = num_prompt + num_decoded
        ids = torch.randint(32, (len(padding), total), device=DEVICE)
        seen = torch.arange(total, device=DEVICE) >= torch.tensor(padding, device=DEVICE)[:, None]

        def read(first, stop):
            mask = seen[:, :stop].long() if any(padding) else None
            with torch.no_grad():
                model(ids[:, first:stop], attention_mask=mask, **as_argument(cache))

        # Attention takes Triton's interpreter longest: that of the prompt is PyTorch's, and few tokens attend
        monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "triton" if DEVICE == "cuda" else "torch")
        read(0, num_prompt)
        monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "triton")
        # Prepared for PyTorch
        cache.layers[0].invalidate_plan()
        # A GPU is looked for, which the interpreter has none of
        cache.layers[0]._is_static = True
        for place in range(num_prompt, total):
            if case == "forked" and place == num_prompt + 20:
                (cache,) = cache.fork(1)
            if place in (num_prompt, num_prompt + 20, total - 1):
                read(place, place + 1)
            else:
                cache.layers[0].update(*torch.randn(2, len(padding), 2, 1, 16, device=DEVICE))
        return cache, seen

    return make


STATIC = [case for case in CASES if case != "growing"]
ALL_CASES = ["gear-2bit", *(pytest.param(case, marks=pytest.mark.long) for case in STATIC if case != "gear-2bit")]


@needs_kernels
@pytest.mark.parametrize("case", ALL_CASES)
def test_attention_equals_pytorch(case, decoded):
    cache, seen = decoded(case)
    layer = cache.layers[0]
    assert layer._pushes_on_device and layer.stats()["tokens_compressed"] > 0
    query = torch.randn(len(seen), 4, 1, 16, device=DEVICE)
    outputs = [layer.plan.attend(query, None, layer.storage.tail) for _ in range(2)]
    hidden = torch.rand(len(query), 1, 1, layer.graph.num_columns, device=DEVICE) < 0.3
    hidden[..., : seen.shape[1]] |= ~seen[:, None, None]
    masked = attend(query, layer.plan.parts(~hidden), 2, None, "triton")
    with plain_pytorch():
        for output in outputs:
            require_close(output, layer.attend(AttentionCall(query, seen[:, None, None])))
        require_close(masked, layer.attend(AttentionCall(query, ~hidden[..., : seen.shape[1]])))


@needs_kernels
@pytest.mark.parametrize("case", [*ALL_CASES, "growing"])
def test_chunks_equal_plain_pytorch(case, decoded):
    """Chunks, exact tokens and counters after pushes on the device, and those of a layer that PyTorch packs."""
    cache, _ = decoded(case, num_decoded=NUM_DECODED if case == "short-prompt" else 1)
    layer = cache.layers[0]
    own = copy.deepcopy(cache).layers[0]
    own.max_length = None
    own._is_static = False
    first_plan = layer.plan
    for number in range(3 * LENGTH):
        states = torch.randn(2, *layer.storage.tail.storage[0].shape[:2], 1, 16, device=DEVICE)
        layer.update(*states)
        with plain_pytorch():
            own.update(*states)
        counts = layer.plan.counts()
        assert counts == count_tokens(layer.storage, layer._length), number
        assert counts.total == layer._length == own._length
        assert torch.equal(layer.storage.tail.keys, own.storage.tail.keys)
        assert torch.equal(layer.storage.tail.values, own.storage.tail.values)
    assert (layer.plan is first_plan) == (case != "growing")
    held = [[each for each in every.storage.segments if each.length] for every in (layer, own)]
    assert sum(each.length for each in held[0]) == sum(each.length for each in held[1])
    for mine, theirs in zip(*(segments[-1].stored() for segments in held), strict=True):
        for name, tensor in mine.items():
            # Chunks of plain PyTorch may follow others in one segment
            expected = theirs[name][:, :, -tensor.shape[2] :].float()
            is_close = (tensor.float() - expected).abs() <= 2e-3 * expected.abs() + 2e-3
            # A code may differ where a number lies at a bound
            assert is_close.float().mean() > 0.99, name


@needs_kernels
def test_unstorable_tokens_are_noticed(decoded):
    cache, _ = decoded("kivi-2bit", num_decoded=1)
    layer = cache.layers[0]
    with pytest.raises(ValueError, match="layer 0: .* exceed the range of float16"):
        for number in range(150):
            states = torch.randn(2, 1, 2, 1, 16, device=DEVICE)
            # In the last chunk when chunks are checked
            states[:, :, :, :, 3] *= 1e30 if number == 55 else 1
            layer.update(*states)


@torch.no_grad()
def check(name, num_steps):
    """Write how many launches and operations a step of a layer has."""
    import stand_in

    from kvcache_plugins.triton_kernels.attention.attend_kernel import attend_kernel
    from kvcache_plugins.triton_kernels.attention.combine import combine_kernel
    from kvcache_plugins.triton_kernels.group_packing.push import push_kernel
    from kvcache_plugins.triton_kernels.group_packing.select import select_kernel

    kernels = {each.fn.__name__: each for each in (attend_kernel, combine_kernel, push_kernel, select_kernel)}
    model, launches, steps, compiled = make_model(64, 2, torch.bfloat16), [], [], []
    cache = create_cache(name, model, max_cache_len=1000)
    # Inputs and allocations of a step; rotated values are turned back between the launches
    own = ("query", "result", "new_", *(["output"] if name == "gear-k4v3" else []))

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
            states = torch.zeros(1, 2, count, 64, dtype=torch.bfloat16)
            keys, values = cache.update(states, states, index)
            query = states.new_zeros(1, 4, count, 64)
            torch.nn.functional.scaled_dot_product_attention(query, keys, values, is_causal=count > 1, enable_gqa=True)

    with stand_in.stand_in_driver() as driver, patch.object(stand_in._Kernel, "run", run):
        attend_to(130)
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
    names = ["push_kernel", "attend_kernel", "attend_kernel", "combine_kernel"]
    assert [kernel for kernel, _ in first_launches] == 2 * names
    assert len({*compiled}) == 1, compiled
    # All that stays is written by kernels, whose arguments are the same
    assert not any(name.endswith("_") for name, _ in first_operations), first_operations
    reading = [bool(READING & {name for name, _ in operations}) for _, operations in steps[1:]]
    has_selection = name.startswith("gear") and name != "gear-k4v3"
    for number, (is_reading, (own_launches, operations)) in enumerate(zip(reading, steps[1:], strict=True), start=1):
        # The host knows when the tail is full; graphs have this launch in every step
        selected = [launch for launch in own_launches if launch[0] == "select_kernel"]
        assert len(selected) == 2 * has_selection * (number % 64 == 0), number
        assert [launch for launch in own_launches if launch not in selected] == first_launches
        assert is_reading or operations == first_operations
    # Now and then the host asks whether all tokens could be stored
    assert sum(reading) <= num_steps // 64 + 1, reading
    assert cache.stats()["chunks_compressed"] >= 2 * (num_steps // 64)
    sys.stdout.write(f"{name}: {len(first_launches) // 2} launches, {len(first_operations) // 2} operations a layer\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_steps"),
    [
        ("gear-2bit", "500"),
        *(pytest.param(name, "200", marks=pytest.mark.long) for name in ("gear", "kivi-2bit", "gear-k4v3")),
    ],
)
def test_every_step_repeats_the_launches_of_the_first(name, num_steps, run_compiling):
    run_compiling(name, num_steps)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", ["gear", "gear-2bit", "kivi-2bit", "gear-k4v3"])
def test_generate_replays_cuda_graphs(name):
    model = make_model(64, 2).to(DEVICE)
    ids = torch.randint(32, (2, 131), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    call = {"attention_mask": mask, "max_new_tokens": 140, "do_sample": False}
    caches = [create_cache(name, model, max_cache_len=300) for _ in range(2)]
    expected = model.generate(ids, **call, **as_argument(caches[0]), disable_compile=True)
    assert torch.equal(model.generate(ids, **call, **as_argument(caches[1])), expected)
    assert caches[1].stats() == caches[0].stats()


if __name__ == "__main__":
    torch.set_num_threads(1)
    check(sys.argv[1], int(sys.argv[2]))
