"""The only place that chooses which kernel computes, and that imports Triton.

`KVCACHE_PLUGINS_KERNELS` overrides: `auto` (the default), `triton` (GPUs, or anywhere under `TRITON_INTERPRET=1`),
`compiled` (CPUs, in C) or `torch` (plain PyTorch, everywhere). A kernel that is missing is replaced by plain PyTorch,
with one warning, and the caches count it.
"""

import os
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
from packaging.version import Version

from kvcache_plugins.formats.rows import RowFormats
from kvcache_plugins.user_warnings import warn_user

from . import library
from .c_structs import MAX_CHANNELS


KERNELS = ("auto", "triton", "torch", "compiled")
_VARIABLE = "KVCACHE_PLUGINS_KERNELS"
# Most new tokens for kernels. More are a prompt: products of matrices, which plain PyTorch does best
MAX_NUM_QUERIES = 16
# The same for compiled attention over groups, which cost more to dequantize than rows
MAX_NUM_COMPILED_QUERIES = 32
# Oldest Triton that compiles all kernels: 3.4 lacks functions of constants, and small operands of `tl.dot`
_OLDEST_TRITON = Version("3.5")


@cache
def load_triton() -> ModuleType:
    """Import `kernels.triton`, for callers that have chosen it: Triton may not be installed."""
    from kvcache_plugins.kernels import triton

    return triton


def requested_kernel() -> str:
    """
    Return the value of `KVCACHE_PLUGINS_KERNELS`.

    Raises:
        ValueError: if the value is not accepted.
    """
    requested = os.environ.get(_VARIABLE, "auto")
    if requested not in KERNELS:
        raise ValueError(f"`{_VARIABLE}` has to be one of {', '.join(KERNELS)}, but got {requested!r}")
    return requested


def choose_kernel(
    query: torch.Tensor, most_compiled: int = MAX_NUM_QUERIES, shared_formats: RowFormats | None = None
) -> tuple[str, bool]:
    """
    Choose the kernel for attention of `query` `[B, heads, new tokens, D]` over packed states, rows of
    `shared_formats` if that is what they are. `"compiled"` is for up to `most_compiled` new tokens.

    Returns:
        `"triton"`, `"compiled"` or `"torch"`, and whether that is a fallback.
    """
    kernel, is_fallback = choose_token_kernel(query)
    if query.shape[2] > (most_compiled if kernel == "compiled" else MAX_NUM_QUERIES):
        return "torch", False
    if kernel == "triton":
        has_room = load_triton().has_room(shared_formats, query.device, query.dtype)
        return (kernel, is_fallback) if has_room else ("torch", True)
    return kernel, is_fallback


def choose_token_kernel(query: torch.Tensor) -> tuple[str, bool]:
    """Choose a kernel for a single new token; `query` may have any shape. See `choose_kernel`."""
    if torch.is_grad_enabled() and query.requires_grad:
        return "torch", False
    return _kernel_on(query.device.type, os.environ.get(_VARIABLE, "auto"))


def compiles_kernels(states: torch.Tensor) -> bool:
    """Return true if Triton's kernels, which are compiled at their first run, compute on the states' device."""
    return _device_type(states) == "cuda" and _kernel_on("cuda", requested_kernel())[0] == "triton"


def has_gpu_kernels() -> bool:
    """Return true if there is a GPU that computes by Triton's kernels."""
    return torch.cuda.is_available() and _kernel_on("cuda", requested_kernel())[0] == "triton"


def choose_flash(query: torch.Tensor, value_dim: int) -> bool:
    """
    Return true if attention of `query` over dense tiles is PyTorch's own flash attention, tile by tile: that of a
    prompt on a CPU, if keys and values have equally many channels, `value_dim`.
    """
    is_prompt = query.shape[2] > MAX_NUM_QUERIES and query.device.type == "cpu"
    if not is_prompt or query.shape[3] != value_dim or requested_kernel() == "torch":
        return False
    return not (torch.is_grad_enabled() and query.requires_grad)


def choose_copy_kernel(states: torch.Tensor) -> str:
    """
    Choose the kernel that copies rows between pages and the device of `states`: `"triton"` or `"torch"`. On CPUs
    plain PyTorch is no fallback, unless `triton` is requested by name.
    """
    requested, device_type = requested_kernel(), _device_type(states)
    wants_kernel = requested == "triton" or requested == "auto" and device_type == "cuda"
    if not wants_kernel or torch.is_grad_enabled() and states.requires_grad:
        return "torch"
    return _kernel_on(device_type, requested)[0]


def choose_coding_kernel(tokens: torch.Tensor, head_dim: int = 0) -> str:
    """
    Choose the kernel that encodes states, or decodes rows, of so many channels: `"compiled"`, `"torch"` or
    `"triton"`, which only encodes. Plain PyTorch is no fallback.
    """
    requested, device_type = os.environ.get(_VARIABLE, "auto"), tokens.device.type
    if tokens.is_meta or requested == "compiled" and device_type != "cpu":
        return "torch"
    kernel, _ = _kernel_on(device_type, requested)
    if kernel == "triton" and not load_triton().can_encode(tokens.dtype, head_dim):
        return "torch"
    return "torch" if kernel == "compiled" and head_dim > MAX_CHANNELS else kernel


def explain_kernel(device_type: str) -> tuple[str, str | None]:
    """
    Explain the kernel for attention of a few new tokens, for caches on a device of a type.

    Returns:
        `"triton"`, `"compiled"` or `"torch"`, and the reason if that is a fallback, or `None`.
    """
    wanted = _wanted_kernel(device_type, requested_kernel())
    reason = _why_not(wanted, device_type)
    return (wanted if reason is None else "torch"), reason


def _device_type(tensor: torch.Tensor) -> str:
    # `eval/benchmarks/kernels.py` replaces it to simulate a GPU
    return tensor.device.type


def _wanted_kernel(device_type: str, requested: str) -> str:
    return requested if requested != "auto" else {"cuda": "triton", "cpu": "compiled"}.get(device_type, "torch")


@cache
def _kernel_on(device_type: str, requested: str) -> tuple[str, bool]:
    """
    Choose the kernel for a few queries on a device, and check the kernel that is `requested`, the variable's value.
    The answer is kept, so that a fallback is warned of once.
    """
    wanted = _wanted_kernel(device_type, requested_kernel())
    reason = _why_not(wanted, device_type)
    if reason is None:
        return wanted, False
    warn_user(
        "attention over compressed or offloaded states and coding run in plain PyTorch instead of "
        f"`{wanted}`: {reason}"
    )
    return "torch", True


def _why_not(kernel: str, device_type: str) -> str | None:
    """Return the reason why a kernel cannot run on a device, or `None`."""
    if kernel == "compiled":
        if device_type != "cpu":
            return f"it runs on CPUs, and the cache is on a {device_type} device"
        return library.why_missing()
    if kernel == "triton":
        if find_spec("triton") is None:
            return "Triton is not installed"
        import triton

        if Version(triton.__version__) < _OLDEST_TRITON:
            return f"the kernels need Triton {_OLDEST_TRITON} or newer, and {triton.__version__} is installed"
        if device_type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return f"it runs on GPUs, and the cache is on a {device_type} device"
        if device_type == "cuda" and torch.version.hip is not None:
            # The decode kernels have instructions of NVIDIA's and rely on subnormal halves
            return "the kernels are NVIDIA's, and this is an AMD GPU"
    return None
