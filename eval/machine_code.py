"""Machine code of kernels for a GPU that need not be there.

Kernels are compiled with the assembler that Triton brings, their instructions counted by kind in its disassembly.
Triton must not interpret.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
    Compiles what Triton would for a launch of a `JITFunction`, in whose arguments tensors stand for aligned ones; for
    a compute capability, such as 90, or an architecture of AMD's, such as `"gfx942"`. Options: `num_warps`, ...
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
    """Counts registers and bytes of local memory a thread, and bytes of shared memory a program."""
    text = _run("cuobjdump", "-res-usage", compiled)
    used = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return {"registers": used["REG"], "spilled": used["STACK"] + used["LOCAL"], "shared": compiled.metadata.shared}


def disassemble(compiled: Any) -> str:
    """Disassembles the machine code of a kernel."""
    return _run("nvdisasm", "-c", compiled)


def _type_name(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _run(tool: str, option: str, compiled: Any) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return subprocess.run([path, option, file.name], check=True, capture_output=True, text=True).stdout


_INTEGER = "IMAD IADD LOP SHF SHL SHR LEA ISETP IMNMX VI SEL SGXT PLOP IABS"
# The first that an operation's name begins with
_KINDS = {
    "tensor core": ("HMMA", "IMMA", "HGMMA", "QGMMA"),
    "global memory": ("LDG", "STG", "ATOM", "RED", "UTMA", "CCTL"),
    "shared memory": ("LDS", "STS", "STAS", "DEPBAR", "SYNCS"),
    "local memory": ("LDL", "STL"),
    "shuffle": ("SHFL", "MOVM", "VOTE", "REDUX"),
    "special function": ("MUFU",),
    "conversion": ("I2F", "F2F", "F2I", "I2I", "FRND"),
    "half": ("HFMA2", "HADD2", "HMUL2", "HMNMX2", "HSET"),
    "float": ("FFMA", "FADD", "FMUL", "FMNMX", "FSET", "FSEL", "FCHK"),
    "byte permutation": ("PRMT",),
    "integer": tuple(_INTEGER.split()),
    "barrier": ("BAR", "WARPSYNC"),
    "control": ("BRA", "BSSY", "BSYNC", "EXIT", "NOP", "CALL", "RET", "BREAK", "WARPSYNC", "BMOV"),
}
_LABEL = re.compile(r"^\s*(\.L_\w+):")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(?P<text>(?P<operation>[\w.]+)[^;]*);")
_TARGET = re.compile(r"\(?(\.L_\w+)")


class Loop(NamedTuple):
    """A loop by its first and last instruction."""

    first: int
    last: int

    def holds(self, other: "Loop") -> bool:
        """Tells whether the other lies within this one."""
        return self != other and self.first <= other.first and other.last <= self.last


class Listing:
    """
    The instructions of one kernel in order.

    Args:
        text (`str`): what `nvdisasm -c` prints.
    """

    def __init__(self, text: str) -> None:
        self.operations: list[str] = []
        labels: dict[str, int] = {}
        branches: list[tuple[int, str]] = []
        for line in text.splitlines():
            if label := _LABEL.match(line):
                labels[label[1]] = len(self.operations)
            elif instruction := _INSTRUCTION.match(line):
                if instruction["operation"].startswith("BRA") and (target := _TARGET.search(instruction["text"])):
                    branches.append((len(self.operations), target[1]))
                self.operations.append(instruction["operation"])
        # Branches to one place may leave its loop from several: the last of them ends it
        ends: dict[int, int] = {}
        for place, target_label in branches:
            if labels.get(target_label, place + 1) <= place:
                ends[labels[target_label]] = max(place, ends.get(labels[target_label], 0))
        # A kernel ends in a branch to itself, which fills its last line
        self.loops = [Loop(first, last) for first, last in sorted(ends.items()) if last > first]

    def _with_products(self) -> list[Loop]:
        loops = [loop for loop in self.loops if self.count(loop)["tensor core"]]
        if not loops:
            raise ValueError("the kernel has no loop with products of tensor cores")
        return loops

    def tile_loop(self) -> Loop:
        """Finds the loop over tiles: the largest with products that is within no other but the one over chunks."""
        loops = self._with_products()
        inner = [loop for loop in loops if any(each.holds(loop) for each in loops)]
        return max(inner or loops, key=lambda loop: loop.last - loop.first)

    def shortest_loop(self) -> Loop:
        """Finds the shortest loop with products: over whole tiles where a kernel has another one for the rest."""
        return min(self._with_products(), key=lambda loop: loop.last - loop.first)

    def loops_within(self, loop: Loop) -> list[Loop]:
        """Lists the loops right inside of one, in order."""
        inside = [each for each in self.loops if loop.holds(each)]
        return [each for each in inside if not any(other.holds(each) for other in inside)]

    def count(self, loop: Loop, without: Sequence[Loop] = ()) -> Counter[str]:
        """Counts instructions of a loop by kind, but for those of other loops."""
        counts: Counter[str] = Counter()
        for place in range(loop.first, loop.last + 1):
            if not any(each.first <= place <= each.last for each in without):
                counts[_kind(self.operations[place])] += 1
        return counts


def _kind(operation: str) -> str:
    return next((kind for kind, names in _KINDS.items() if operation.startswith(names)), "other")
