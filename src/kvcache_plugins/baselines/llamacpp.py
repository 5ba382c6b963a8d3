"""llama.cpp's types for a KV cache: blocks of 32 channels, byte for byte as `ggml` stores them.

    q8_0   d | 32 signed bytes                          34 bytes    d * code
    q5_1   d | m | fifth bits | 16 bytes of nibbles     24 bytes    d * code + m
    q5_0   d | fifth bits | 16 bytes of nibbles         22 bytes    d * (code - 16)
    q4_1   d | m | 16 bytes of nibbles                  20 bytes    d * code + m
    q4_0   d | 16 bytes of nibbles                      18 bytes    d * (code - 8)

`d` and `m` are float16. A byte of nibbles has channel j in its low bits and channel j + 16 in its high bits. Bit j of
the fifth bits, lowest first, belongs to channel j. Codes are computed with the scale before it is rounded.
"""

from dataclasses import dataclass

import torch

from kvcache_plugins.formats.bits import bytes_of_halves, halves_of_bytes, pack, unpack
from kvcache_plugins.formats.hadamard import rotate


BLOCK_TYPES = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
BLOCK = 32
_HALF_BYTES = 2
_NIBBLE_BYTES = 16
_FIFTH_BYTES = 4
# Channels of values that are rotated together; for keys it is the largest power of two that divides the head
_VALUE_ROTATION = 64


@dataclass(frozen=True, slots=True)
class BlockCoder:
    """
    Coder of keys or values as a sequence of blocks. If blocks do not divide the head, which llama.cpp refuses, the
    last block is padded with the last channel.

    Attributes:
        block_type (`str`): type of the blocks, one of `BLOCK_TYPES`.
        head_dim (`int`): D.
        rotation (`int`): channels that a Hadamard matrix rotates together; 0 for no rotation.
    """

    block_type: str
    head_dim: int
    rotation: int

    @property
    def _nbits(self) -> int:
        """Bits of a code."""
        return int(self.block_type[1])

    @property
    def _has_minimum(self) -> bool:
        """True if codes count from the block's minimum, and not from the middle."""
        return self.block_type.endswith("1")

    @property
    def _num_blocks(self) -> int:
        return -(-self.head_dim // BLOCK)

    @property
    def row_size(self) -> int:
        return self._num_blocks * (_HALF_BYTES * (1 + self._has_minimum) + BLOCK * self._nbits // 8)

    def encode(self, states: torch.Tensor) -> torch.Tensor:
        nbits = self._nbits
        states = self._rotate(states)
        missing = -self.head_dim % BLOCK
        if missing:
            states = torch.cat([states, states[..., -1:].expand(*states.shape[:-1], missing)], dim=-1)
        blocks = states.unflatten(-1, (-1, BLOCK))
        if nbits == 8:
            scale = blocks.abs().amax(dim=-1, keepdim=True) / 127
            steps = blocks * _inverse(scale)
            # Rounds halves away from zero
            codes = (steps.abs() + 0.5).floor().copysign(steps)
            return torch.cat([bytes_of_halves(scale), codes.to(torch.int8).view(torch.uint8)], dim=-1).flatten(-2)
        if self._has_minimum:
            minimum = blocks.amin(dim=-1, keepdim=True)
            scale = (blocks.amax(dim=-1, keepdim=True) - minimum) / (2**nbits - 1)
            codes = (blocks - minimum) * _inverse(scale) + 0.5
            head = [bytes_of_halves(scale), bytes_of_halves(minimum)]
        else:
            middle = 2 ** (nbits - 1)
            # The lowest code is exactly the value of the largest magnitude
            farthest = blocks.gather(-1, blocks.abs().argmax(dim=-1, keepdim=True))
            scale = farthest / -middle
            codes = blocks * _inverse(scale) + (middle + 0.5)
            head = [bytes_of_halves(scale)]
        whole = codes.floor().clamp(0, 2**nbits - 1).to(torch.uint8)
        if nbits == 5:
            # `ggml` has adjacent channels in a byte, where `pack` has channels four apart
            head.append(pack((whole >> 4).unflatten(-1, (-1, 8)).mT.flatten(-2), 1))
        return torch.cat([*head, pack(whole & 15, 4)], dim=-1).flatten(-2)

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        nbits = self._nbits
        data = rows.unflatten(-1, (self._num_blocks, -1))
        scale = halves_of_bytes(data[..., :_HALF_BYTES])
        data = data[..., _HALF_BYTES:]
        if nbits == 8:
            return self._join(scale * data.contiguous().view(torch.int8).float())
        codes = unpack(data[..., -_NIBBLE_BYTES:], 4, BLOCK)
        if nbits == 5:
            fifth_bits = data[..., -_NIBBLE_BYTES - _FIFTH_BYTES : -_NIBBLE_BYTES]
            codes = codes | (unpack(fifth_bits, 1, BLOCK).unflatten(-1, (8, -1)).mT.flatten(-2) << 4)
        if self._has_minimum:
            minimum = halves_of_bytes(data[..., :_HALF_BYTES])
            return self._join(codes.float() * scale + minimum)
        return self._join((codes.float() - 2 ** (nbits - 1)) * scale)

    def _join(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return states in place of decoded blocks."""
        return self._rotate(blocks.flatten(-2)[..., : self.head_dim])

    def _rotate(self, states: torch.Tensor) -> torch.Tensor:
        """Rotate states. The matrix is its own inverse."""
        return rotate(states.unflatten(-1, (-1, self.rotation))).flatten(-2) if self.rotation else states


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale.abs() < torch.finfo(torch.float32).tiny, 0, 1 / scale)


def rotation_of(side: str, head_dim: int) -> int:
    """Return the number of channels of `"keys"` or `"values"` that llama.cpp rotates together; 0 for no rotation."""
    if head_dim % _VALUE_ROTATION:
        return 0
    return head_dim & -head_dim if side == "keys" else _VALUE_ROTATION
