"""Instructions of a kernel's loops, by kind, from the disassembly of its machine code."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple


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
    "integer": (
        "IMAD",
        "IADD",
        "LOP",
        "SHF",
        "SHL",
        "SHR",
        "LEA",
        "ISETP",
        "IMNMX",
        "VI",
        "SEL",
        "SGXT",
        "PLOP",
        "IABS",
    ),
    "barrier": ("BAR", "WARPSYNC"),
    "control": ("BRA", "BSSY", "BSYNC", "EXIT", "NOP", "CALL", "RET", "BREAK", "WARPSYNC", "BMOV"),
}
_OTHER = "other"
_NO_LOOP = "the kernel has no loop with products of tensor cores"
_LABEL = re.compile(r"^\s*(\.L_\w+):")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(?P<text>(?P<operation>[\w.]+)[^;]*);")
_TARGET = re.compile(r"\(?(\.L_\w+)")


class Loop(NamedTuple):
    """A loop by its first and last instruction."""

    first: int
    last: int

    def holds(self, other: "Loop") -> bool:
        """Whether the other lies within this one."""
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

    def tile_loop(self) -> Loop:
        """The loop over tiles: the largest with products in it that is within no other but the one over chunks."""
        with_products = [loop for loop in self.loops if self.count(loop)["tensor core"]]
        inner = [loop for loop in with_products if any(each.holds(loop) for each in with_products)]
        candidates = inner or with_products
        if not candidates:
            raise ValueError(_NO_LOOP)
        return max(candidates, key=lambda loop: loop.last - loop.first)

    def shortest_loop(self) -> Loop:
        """The shortest loop with products: that over whole tiles where a kernel has another one for the rest."""
        with_products = [loop for loop in self.loops if self.count(loop)["tensor core"]]
        if not with_products:
            raise ValueError(_NO_LOOP)
        return min(with_products, key=lambda loop: loop.last - loop.first)

    def loops_within(self, loop: Loop) -> list[Loop]:
        """The loops right inside of one, in order."""
        inside = [each for each in self.loops if loop.holds(each)]
        return [each for each in inside if not any(other.holds(each) for other in inside)]

    def count_all(self, num_turns: int) -> Counter[str]:
        """Instructions of the kernel by kind, those of loops with products in them as often as such a loop turns."""
        counts: Counter[str] = Counter()
        turning = [loop for loop in self.loops if self.count(loop)["tensor core"]]
        for place, operation in enumerate(self.operations):
            counts[_kind(operation)] += num_turns ** sum(loop.first <= place <= loop.last for loop in turning)
        return counts

    def count(self, loop: Loop, without: Sequence[Loop] = ()) -> Counter[str]:
        """Instructions of a loop by kind, but for those of other loops."""
        counts: Counter[str] = Counter()
        for place in range(loop.first, loop.last + 1):
            if not any(each.first <= place <= each.last for each in without):
                counts[_kind(self.operations[place])] += 1
        return counts


def _kind(operation: str) -> str:
    return next((kind for kind, names in _KINDS.items() if operation.startswith(names)), _OTHER)
