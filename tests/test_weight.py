"""The weight of every room, in lines: `make weight` prints it beside the plan, and no room may outgrow its ceiling."""

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest


PROJECT_ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "src/kvcache_plugins"
SUFFIXES = (".py", ".c", ".h")


class Room(NamedTuple):
    """Folders and files, and how many lines they should have together.

    A ceiling is the weight, in fifties, of the day when the room was last made lighter. It may be lowered, and is
    raised with a reason in the changelog alone.
    """

    parts: tuple[str, ...]
    plan: int
    ceiling: int


def in_package(*names: str) -> tuple[str, ...]:
    return tuple(f"{PACKAGE}/{name}" for name in names)


ROOMS = {
    "kernels": Room(in_package("kernels"), 2_500, 5_855),
    "codecs": Room(in_package("codecs"), 2_500, 3_260),
    "cache": Room(in_package("layers", "reports"), 3_300, 4_250),
    "gear": Room(in_package("gear"), 1_600, 1_830),
    "infinigen": Room(in_package("infinigen", "infinigen_gear"), 2_700, 3_318),
    "kv_runahead": Room(in_package("kv_runahead"), 1_500, 1_580),
    "baselines": Room(in_package("baselines"), 700, 875),
    "batching": Room(in_package("batching"), 900, 780),
    "store, advice, contract": Room(in_package("prompt_store", "advice", "contract"), 3_600, 3_245),
    "serving": Room(in_package("serving"), 400, 425),
    "cli": Room(in_package("cli", "console"), 1_600, 1_585),
    "ground": Room((*in_package("registry", "models", "files"), f":(glob){PACKAGE}/*.py"), 1_200, 1_680),
    "all of src": Room(("src",), 20_000, 28_610),
    "triton_kernels": Room(("triton_kernels",), 3_500, 3_925),
    "eval": Room(("eval",), 5_500, 6_485),
    "tests": Room(("tests",), 15_000, 23_930),
}


def weigh(room: Room) -> int:
    """Counts the lines of all sources of a room that git tracks, or would."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *room.parts]
    listed = subprocess.run(command, cwd=PROJECT_ROOT, check=True, capture_output=True, text=True).stdout
    paths = [PROJECT_ROOT / line for line in listed.splitlines() if line.endswith(SUFFIXES)]
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths if path.exists())


@pytest.mark.skipif(not (PROJECT_ROOT / ".git").exists(), reason="git lists the files, and this is no checkout")
@pytest.mark.parametrize("name", ROOMS)
def test_no_room_outgrows_its_ceiling(name: str) -> None:
    assert weigh(ROOMS[name]) <= ROOMS[name].ceiling


def test_every_module_of_the_package_is_in_a_room() -> None:
    listed = {part for room in ROOMS.values() for part in room.parts if PACKAGE in part}
    others = [part.replace("(glob)", "(exclude,glob)") if ":" in part else f":(exclude){part}" for part in listed]
    rest = weigh(Room(("src", *others), 0, 0))
    assert rest == 0


def main() -> None:
    """Writes a line for each room."""
    sys.stdout.write(f"{'room':24}{'lines':>8}{'plan':>8}{'ceiling':>9}\n")
    for name, room in ROOMS.items():
        sys.stdout.write(f"{name:24}{weigh(room):8,}{room.plan:8,}{room.ceiling:9,}\n")


if __name__ == "__main__":
    main()
