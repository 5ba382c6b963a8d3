"""llama.cpp's types for a KV cache: blocks of 32 channels, byte for byte as `ggml` stores them.

    q8_0   d | 32 signed bytes                          34 bytes    d * code
    q5_1   d | m | fifth bits | 16 bytes of nibbles     24 bytes    d * code + m
    q5_0   d | fifth bits | 16 bytes of nibbles         22 bytes    d * (code - 16)
    q4_1   d | m | 16 bytes of nibbles                  20 bytes    d * code + m
    q4_0   d | 16 bytes of nibbles                      18 bytes    d * (code - 8)

`d` and `m` are float16. A nibble's byte holds channel j below and channel j + 16 above; bit j of the four bytes of
fifth bits, lowest first, belongs to channel j. Codes are made with the scale as it was before it was rounded.
"""

from dataclasses import dataclass

import torch

from .quantization import bytes_of_halves, halves_of_bytes, pack, unpack
from .rotation import rotate


BLOCK = 32
_HALF_BYTES, _NIBBLE_BYTES, _FIFTH_BYTES = 2, 16, 4
# Values are rotated in stretches of that many channels, keys in the largest power of two that divides the head
_VALUE_ROTATION = 64


@dataclass(frozen=True, slots=True)
class BlockType:
    """
    A type of blocks.

    Attributes:
        nbits (`int`): bits of a code.
        has_minimum (`bool`): whether codes count from the block's minimum up, else from the middle.
    """

    nbits: int
    has_minimum: bool

    @property
    def size(self) -> int:
        """Bytes of a block."""
        return _HALF_BYTES * (1 + self.has_minimum) + BLOCK * self.nbits // 8

    def encode(self, blocks: torch.Tensor) -> torch.Tensor:
        """Codes blocks `[..., N, 32]`, float32, as bytes `[..., N, bytes of a block]`."""
        if self.nbits == 8:
            scale = blocks.abs().amax(dim=-1, keepdim=True) / 127
            steps = blocks * _inverse(scale)
            # Halves go away from zero
            codes = (steps.abs() + 0.5).floor().copysign(steps)
            return torch.cat([bytes_of_halves(scale), codes.to(torch.int8).view(torch.uint8)], dim=-1)
        most = 2**self.nbits - 1
        if self.has_minimum:
            least = blocks.amin(dim=-1, keepdim=True)
            scale = (blocks.amax(dim=-1, keepdim=True) - least) / most
            codes = (blocks - least) * _inverse(scale) + 0.5
            head = [bytes_of_halves(scale), bytes_of_halves(least)]
        else:
            middle = 2 ** (self.nbits - 1)
            # The number that is farthest out, with its sign, is met exactly by the lowest code
            farthest = blocks.gather(-1, blocks.abs().argmax(dim=-1, keepdim=True))
            scale = farthest / -middle
            codes = blocks * _inverse(scale) + (middle + 0.5)
            head = [bytes_of_halves(scale)]
        whole = codes.floor().clamp(0, most).to(torch.uint8)
        if self.nbits == 5:
            head.append(_pack_in_order(whole >> 4))
        return torch.cat([*head, pack(whole & 15, 4)], dim=-1)

    def decode(self, data: torch.Tensor) -> torch.Tensor:
        """Decodes blocks `[..., N, 32]`, float32, of their bytes."""
        scale = halves_of_bytes(data[..., :_HALF_BYTES])
        rest = data[..., _HALF_BYTES:]
        if self.nbits == 8:
            return scale * rest.contiguous().view(torch.int8).float()
        if self.has_minimum:
            least, rest = halves_of_bytes(rest[..., :_HALF_BYTES]), rest[..., _HALF_BYTES:]
        codes = unpack(rest[..., -_NIBBLE_BYTES:], 4, BLOCK)
        if self.nbits == 5:
            codes = codes | (_unpack_in_order(rest[..., :_FIFTH_BYTES]) << 4)
        if self.has_minimum:
            return codes.float() * scale + least
        return (codes.float() - 2 ** (self.nbits - 1)) * scale


BLOCK_TYPES = {
    "q8_0": BlockType(8, False),
    "q5_1": BlockType(5, True),
    "q5_0": BlockType(5, False),
    "q4_1": BlockType(4, True),
    "q4_0": BlockType(4, False),
}


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale.abs() < torch.finfo(torch.float32).tiny, 0, 1 / scale)


def _pack_in_order(bits: torch.Tensor) -> torch.Tensor:
    """Packs bits `[..., 8 N]`, neighbours in one byte, lowest first, as bytes `[..., N]`."""
    shifts = torch.arange(8, device=bits.device, dtype=torch.uint8)
    return (bits.unflatten(-1, (-1, 8)) << shifts).sum(dim=-1).to(torch.uint8)


def _unpack_in_order(data: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(8, device=data.device, dtype=torch.uint8)
    return ((data[..., None] >> shifts) & 1).flatten(-2)


@dataclass(frozen=True, slots=True)
class BlockCoder:
    """
    Codes keys or values: blocks one after another. A head of no whole number of blocks, which llama.cpp
    refuses, has its last block filled up with its last channel.

    Attributes:
        block_type (`BlockType`): of its blocks.
        head_dim (`int`): D.
        rotation (`int`): channels that a Hadamard matrix rotates together; 0 if none are.
    """

    block_type: BlockType
    head_dim: int
    rotation: int

    @property
    def num_blocks(self) -> int:
        """Blocks of a token."""
        return -(-self.head_dim // BLOCK)

    @property
    def row_size(self) -> int:
        return self.num_blocks * self.block_type.size

    def encode(self, states: torch.Tensor) -> torch.Tensor:
        states, missing = self._rotate(states), -self.head_dim % BLOCK
        if missing:
            states = torch.cat([states, states[..., -1:].expand(*states.shape[:-1], missing)], dim=-1)
        return self.block_type.encode(states.unflatten(-1, (-1, BLOCK))).flatten(-2)

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        blocks = self.block_type.decode(rows.unflatten(-1, (self.num_blocks, -1)))
        return self._rotate(blocks.flatten(-2)[..., : self.head_dim])

    def _rotate(self, states: torch.Tensor) -> torch.Tensor:
        """Rotates states, or rotates them back: the matrix is its own inverse."""
        return rotate(states.unflatten(-1, (-1, self.rotation))).flatten(-2) if self.rotation else states


def rotation_of(side: str, head_dim: int) -> int:
    """Returns the channels that llama.cpp rotates together of `"keys"` or `"values"`; 0 where it rotates none."""
    if head_dim % _VALUE_ROTATION:
        return 0
    return head_dim & -head_dim if side == "keys" else _VALUE_ROTATION
