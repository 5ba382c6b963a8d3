"""llama.cpp's blocks: byte for byte those of a plain loop over numbers, written from the description of the format."""

import struct
from collections.abc import Iterator

import pytest
import torch

from kvcache_plugins.baselines.llamacpp import BlockCoder, rotation_of


SIZES = {"q8_0": 34, "q5_1": 24, "q5_0": 22, "q4_1": 20, "q4_0": 18}
# Worst error of a block, in steps; numbers at the far end of the types without minimum lie a step beyond the last code
WORST = {"q8_0": 0.51, "q5_1": 0.52, "q5_0": 1.02, "q4_1": 0.52, "q4_0": 1.02}


def float32(number: float) -> float:
    return struct.unpack("f", struct.pack("f", number))[0]


def plain_block(numbers: list[float], name: str) -> bytes:
    """One block, number by number."""
    if name == "q8_0":
        scale = float32(max(map(abs, numbers)) / 127)
        codes = [int(abs(each / scale) + 0.5) * (1 if each > 0 else -1) if scale else 0 for each in numbers]
        return struct.pack("<e32b", scale, *codes)
    nbits = int(name[1])
    if name.endswith("1"):
        low, high = min(numbers), max(numbers)
        scale = float32((high - low) / (2**nbits - 1))
        steps = [(each - low) / scale + 0.5 if scale else 0 for each in numbers]
        head = struct.pack("<ee", scale, low)
    else:
        scale = float32(max(numbers, key=abs) / -(2 ** (nbits - 1)))
        steps = [(each / scale if scale else 0) + 2 ** (nbits - 1) + 0.5 for each in numbers]
        head = struct.pack("<e", scale)
    codes = [min(2**nbits - 1, int(step)) for step in steps]
    if nbits == 5:
        head += struct.pack("<I", sum((code >> 4) << number for number, code in enumerate(codes)))
    return head + bytes((codes[j] & 15) | (codes[j + 16] & 15) << 4 for j in range(16))


def blocks() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    yield torch.randn(50, 32, generator=generator)
    yield torch.randn(50, 32, generator=generator) * 1e3 + 500
    yield torch.zeros(1, 32)
    yield torch.full((1, 32), -0.75)


@pytest.mark.parametrize("name", SIZES)
def test_bytes_equal_the_published_format(name: str) -> None:
    for numbers in blocks():
        data = BlockCoder(name, 32, 0).encode(numbers)
        assert data.shape == (len(numbers), SIZES[name])
        expected = [plain_block(row, name) for row in numbers.tolist()]
        differing = sum(bytes(found.tolist()) != each for found, each in zip(data, expected, strict=True))
        # A number halfway between two codes may go either way, as division by a scale rounds otherwise
        assert differing <= len(numbers) // 25
        decoded = BlockCoder(name, 32, 0).decode(data)
        most = 127 if name == "q8_0" else 2 ** int(name[1]) - 1
        spread = numbers.amax(1) - numbers.amin(1) if name.endswith("1") else numbers.abs().amax(1)
        step = spread / (most if name.endswith("1") or name == "q8_0" else 2 ** (int(name[1]) - 1))
        bound = WORST[name] * step + 1e-3 * numbers.abs().amax(1)
        assert bool(((decoded - numbers).abs() <= bound[:, None]).all())


@pytest.mark.parametrize(("head_dim", "keys", "values"), [(64, 64, 64), (128, 128, 64), (192, 64, 64), (96, 0, 0)])
def test_rotation_sizes_equal_llamacpps(head_dim: int, keys: int, values: int) -> None:
    assert (rotation_of("keys", head_dim), rotation_of("values", head_dim)) == (keys, values)
    coder = BlockCoder("q8_0", head_dim, keys)
    states = torch.randn(2, 3, 4, head_dim)
    plain = BlockCoder("q8_0", head_dim, 0)
    assert torch.equal(coder.encode(states), plain.encode(states)) is (keys == 0)
    assert (coder.decode(coder.encode(states)) - states).norm() < 0.01 * states.norm()


@pytest.mark.parametrize("head_dim", [1, 31, 33, 80])
def test_a_partial_last_block_keeps_its_range(head_dim: int) -> None:
    states = torch.randn(2, 3, 4, head_dim) + 5
    for name, size in SIZES.items():
        coder = BlockCoder(name, head_dim, 0)
        rows = coder.encode(states)
        assert rows.shape[-1] == coder.row_size == size * -(-head_dim // 32)
        # Values that fill the block up do not widen its range
        assert (coder.decode(rows) - states).abs().amax() < 0.7
