"""Constants of stored tokens in C and in Triton's kernels equal those of `formats`."""

import re
from pathlib import Path

import pytest

from kvcache_plugins import kernels
from kvcache_plugins.formats import bits, groups, quantizer, rows
from kvcache_plugins.triton_kernels import stored_format


FOLDER = Path(kernels.__file__).parent / "cpu"
NAMES = ["SCALE_STEPS", "SCALE_OFFSET", "LAST_SCALE", "LEAST_GAIN"]
EXPECTED = {name: vars(rows)[name] for name in NAMES}
EXPECTED |= {"MAX_WIDTH": quantizer.MAX_WIDTH, "BAND": quantizer.BLOCK}


def constants() -> dict[str, float]:
    """Every number that `coding.h` gives a name in capitals, defined or enumerated."""
    text = (FOLDER / "coding.h").read_text(encoding="utf-8")
    return {name: float(number) for name, number in re.findall(r"\b([A-Z_]+)(?: =)? ([0-9.]+)f?\b", text)}


@pytest.mark.parametrize("name", EXPECTED)
def test_c_has_the_constants_of_formats(name):
    assert constants()[name] == EXPECTED[name]


@pytest.mark.parametrize("name", ["SCALE_STEPS", "SCALE_OFFSET", "LAST_SCALE", "LEAST_GAIN", "OUTLIER_TILE"])
def test_triton_has_the_constants_of_formats(name):
    assert getattr(stored_format, name) == {**vars(rows), **vars(groups)}[name]


def test_triton_has_the_bit_planes_of_formats():
    assert stored_format.BIT_PLANES.items() <= bits._PLANES.items()
