"""Kernels compiled for a GPU that need not be there, with the assembler and disassembler that Triton brings."""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def compile_for(kernel: Any, arguments: Mapping[str, Any], capability: int | str, **options: int) -> Any:
    """
    What Triton would compile for a launch.

    Args:
        kernel (`triton.runtime.JITFunction`): the kernel.
        arguments (`Mapping[str, Any]`): what it is launched with; tensors on any device stand for aligned ones.
        capability (`int` or `str`): compute capability, such as 90, or an architecture of AMD's, such as `"gfx942"`.
        options (`int`): `num_warps`, `num_stages`.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        is_one = isinstance(value, int) and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or is_one:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = _type_name(value)
        is_multiple = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
        if is_multiple and not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    target = GPUTarget("hip", capability, 64) if isinstance(capability, str) else GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=options)


def resources(compiled: Any) -> dict[str, int]:
    """Registers and bytes of local memory a thread, and bytes of shared memory a program."""
    text = _run("cuobjdump", "-res-usage", compiled)
    registers, stack, local = (int(_search(rf"{name}:(\d+)", text)) for name in ("REG", "STACK", "LOCAL"))
    return {"registers": registers, "spilled": stack + local, "shared": compiled.metadata.shared}


def disassemble(compiled: Any) -> str:
    """The machine code as text."""
    return _run("nvdisasm", "-c", compiled)


def _type_name(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _search(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None
    return match[1]


def _run(tool: str, option: str, compiled: Any) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return subprocess.run([path, option, file.name], check=True, capture_output=True, text=True).stdout
