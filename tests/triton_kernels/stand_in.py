"""A stand-in for a GPU's driver: calls of launchers and compilations are counted on a machine without one.

Launches run nothing and kernels are not compiled: how often Triton would compile, by its own keys, is then known.
Results are zeros. Triton must not interpret. Programs of this folder import it from beside them.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch


class StandIn:
    """
    Counts of launches and compilations since it began.

    Attributes:
        launches (`Counter[str]`): how often each kernel was launched.
        compilations (`list[tuple[str, Any]]`): the kernel and the key of everything that would have been compiled.
    """

    def __init__(self, capability: int) -> None:
        self.launches: Counter[str] = Counter()
        self.compilations: list[tuple[str, Any]] = []
        self._capability = capability

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)


class _Kernel:
    """Metadata that Triton keeps of a compilation."""

    function = packed_metadata = None

    def __init__(self, name: str, stand_in: StandIn) -> None:
        self._name, self._stand_in = name, stand_in

    def launch_metadata(self, *arguments: object) -> None:
        return None

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        # Triton's own reads all three, when it is called
        _, _, _ = grid
        return self.run

    def run(self, *arguments: object) -> None:
        self._stand_in.launches[self._name] += 1


@contextmanager
def stand_in_driver(capability: int = 90) -> Iterator[StandIn]:
    """Has Triton run on a GPU that is not there; caches on any device take its kernels."""
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from kvcache_plugins.kernels import engine

    stand_in = StandIn(capability)
    used: list[Any] = []

    def compile_nothing(function: Any, key: Any, signature: dict[str, str], device: int, *rest: Any) -> _Kernel:
        name = function.fn.__name__
        constants, _, attributes = rest[0], rest[1], rest[2]
        names = list(signature)
        known = {names[path[0]]: value for path, value in constants.items()}
        aligned = {names[path[0]]: value for path, value in attributes.items() if value}
        stand_in.compilations.append((name, {**signature, **known, **{f"{n} is": v for n, v in aligned.items()}}))
        used.append(function)
        kernel = _Kernel(name, stand_in)
        function.device_caches[device][0][key] = kernel
        return kernel

    empty, zeros_like, new_zeros = torch.empty, torch.zeros_like, torch.Tensor.new_zeros

    def filled(*size: Any, **options: Any) -> torch.Tensor:
        # Not `torch.zeros`: of the meta device that calls `torch.empty` itself
        made = empty(*size, **options)
        return made if made.is_meta else made.zero_()

    before = driver._active
    driver.set_active(stand_in)
    try:
        with (
            patch.object(JITFunction, "_do_compile", compile_nothing),
            patch.object(engine, "_kernel_on", lambda device_type, requested: ("triton", False)),
            patch.object(engine, "_device_type", lambda tensor: "cuda"),
            # Memory that no kernel fills would hold anything
            patch.object(torch, "empty", filled),
            patch.object(torch, "empty_like", zeros_like),
            patch.object(torch.Tensor, "new_empty", new_zeros),
        ):
            yield stand_in
    finally:
        driver._active = before
        for function in used:
            function.device_caches.clear()


def make_model(
    head_dim: int,
    num_layers: int = 1,
    dtype: torch.dtype = torch.float32,
    num_heads: int = 4,
    family: str = "llama",
) -> Any:
    """A random model of two key/value heads, by default a Llama."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": num_heads * head_dim, "intermediate_size": 64, "eos_token_id": None}
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": 2, "num_hidden_layers": num_layers}
    heads["head_dim"] = head_dim
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **heads)).eval().to(dtype)
