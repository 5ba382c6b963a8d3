"""Kept launches have the arguments of those prepared anew, read nothing back, and allocate a result and a workspace:
under a stand-in for a GPU's driver.

In a process of its own, as Triton decides when it is imported whether it interprets.
"""

import copy
import pickle
import sys
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig


NUM_HEADS, HEAD_DIM = 2, 64
SCALE = HEAD_DIM**-0.5
# What every step writes to
OUTPUTS = ("query_ptr", "result_ptr", "output_", "maximum_", "total_")
ALIGNMENT = 16


class Counted(TorchDispatchMode):
    """Counts what is allocated and copied, and where the host waits for the device."""

    def __init__(self):
        super().__init__()
        self.allocations = self.copies = self.reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.reads += name in ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal")
        self.copies += name == "_to_copy"
        self.allocations += name.startswith(("new_empty", "new_zeros", "empty", "zeros", "new_full"))
        return func(*args, **(kwargs or {}))


def record(kernel_calls, name, kernel, arguments):
    """Arguments of a launch by name, pointers as addresses."""
    values = {
        parameter.name: value.data_ptr() if isinstance(value, torch.Tensor) else value
        for parameter, value in zip(kernel.params, arguments, strict=True)
    }
    kernel_calls.append((name, values))


def check(name):
    from kvcache_plugins.eval import machine_code
    from kvcache_plugins.kernels.triton import attend as attend_all
    from kvcache_plugins.registry import create_cache
    from kvcache_plugins.triton_kernels.attention.attend_kernel import attend_kernel
    from kvcache_plugins.triton_kernels.attention.combine import combine_kernel
    from kvcache_plugins.triton_kernels.transform_coding.attend_kernel import attend_kernel as attend_rows_kernel

    config = LlamaConfig(
        num_hidden_layers=1,
        num_attention_heads=4 * NUM_HEADS,
        num_key_value_heads=NUM_HEADS,
        hidden_size=4 * NUM_HEADS * HEAD_DIM,
    )
    cache = create_cache(name, config)
    is_coded = cache.layers[0].packing.has_windows
    kernels = {"attend_kernel": attend_rows_kernel if is_coded else attend_kernel, "combine_kernel": combine_kernel}
    calls = []

    def run(self, *arguments):
        if self._name in kernels:
            # The launcher is given nine things before the kernel's own arguments, a kept launch none
            kernel = kernels[self._name]
            record(calls, self._name, kernel, arguments[-len(kernel.params) :])

    def attend_parts(query, dense, compressed):
        return attend_all(query, [*dense[:-1], *compressed, dense[-1]], NUM_HEADS, SCALE)

    def launches_of(query, dense, compressed):
        calls.clear()
        attend_parts(query, dense, compressed)
        return list(calls)

    with machine_code.stand_in_driver(), torch.inference_mode(), patch.object(machine_code._Kernel, "run", run):

        def step(num_new):
            states = torch.zeros(1, NUM_HEADS, num_new, HEAD_DIM, dtype=torch.bfloat16)
            return cache.update(states, states, 0), states.new_zeros(1, 4 * NUM_HEADS, num_new, HEAD_DIM)

        def attend(num_new):
            (keys, values), query = step(num_new)
            torch.nn.functional.scaled_dot_product_attention(
                query, keys, values, is_causal=num_new > 1, enable_gqa=True
            )

        attend(200)
        num_kept, reads = 0, []
        for _ in range(90):
            with Counted() as mode:
                attend(1)
            reads.append(mode.reads)
            layer = cache.layers[0]
            dense, compressed = split(list(layer._parts(None)))
            query = torch.zeros(1, 4 * NUM_HEADS, 1, HEAD_DIM, dtype=torch.bfloat16)
            kept = compressed[0].kept.get("step")
            got = launches_of(query, dense, compressed)
            fresh = [copy.copy(part) for part in compressed]
            for part in fresh:
                object.__setattr__(part, "kept", {})
            expected = launches_of(query, dense, fresh)
            assert [kernel for kernel, _ in got] == [kernel for kernel, _ in expected]
            for (kernel, ours), (_, theirs) in zip(got, expected, strict=True):
                for argument in ours:
                    if argument.startswith(OUTPUTS) and argument.endswith("_ptr"):
                        assert ours[argument] is None or ours[argument] % ALIGNMENT == 0, argument
                    else:
                        assert ours[argument] == theirs[argument], (kernel, argument)
            if kept is not None and compressed[0].kept.get("step") is kept:
                num_kept += 1
        with Counted() as mode:
            attend_parts(query, dense, compressed)
        assert mode.reads == mode.copies == 0
        is_rotated = not is_coded and compressed[0].values.is_rotated
        assert is_rotated or mode.allocations == 2, mode.allocations
        assert copy.deepcopy(kept) is None and pickle.loads(pickle.dumps(kept)) is None
    # Whether a chunk was finite is asked for once, of both sides together
    num_packed = layer.packing.residual_length - layer.packing.num_kept
    # On a CPU, which has to wait for nothing, a codec that may spread errors asks whether any are shared
    most = 2 if name == "gear-k4v3" else 1
    assert max(reads) == most and sum(reads) <= most * -(-90 // num_packed), reads
    # The step after a compression is prepared anew
    assert num_kept >= 90 - 90 // num_packed - 1, num_kept


def split(parts):
    from kvcache_plugins.codecs.parts import DensePart

    return (
        [part for part in parts if isinstance(part, DensePart)],
        [part for part in parts if not isinstance(part, DensePart)],
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gear-2bit", pytest.param("gear-k4v3", marks=pytest.mark.long), "gear-t25"])
def test_kept_launches_are_those_prepared_anew(name, run_compiling):
    run_compiling(name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    check(sys.argv[1])
