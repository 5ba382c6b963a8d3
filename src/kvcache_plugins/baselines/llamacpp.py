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

from kvcache_plugins.formats.bits import bytes_of_halves, halves_of_bytes, pack, unpack
from kvcache_plugins.formats.hadamard import rotate


BLOCK_TYPES = "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"
BLOCK = 32
_HALF_BYTES, _NIBBLE_BYTES, _FIFTH_BYTES = 2, 16, 4
# Values are rotated in stretches of that many channels, keys in the largest power of two that divides the head
_VALUE_ROTATION = 64


@dataclass(frozen=True, slots=True)
class BlockCoder:
    """
    Codes keys or values: blocks one after another. A head of no whole number of blocks, which llama.cpp
    refuses, has its last block filled up with its last channel.

    Attributes:
        block_type (`str`): of its blocks, one of `BLOCK_TYPES`.
        head_dim (`int`): D.
        rotation (`int`): channels that a Hadamard matrix rotates together; 0 if none are.
    """

    block_type: str
    head_dim: int
    rotation: int

    @property
    def _form(self) -> tuple[int, bool]:
        """Bits of a code, and whether codes count from the block's minimum up, else from the middle."""
        return int(self.block_type[1]), self.block_type.endswith("1")

    @property
    def row_size(self) -> int:
        nbits, has_minimum = self._form
        return -(-self.head_dim // BLOCK) * (_HALF_BYTES * (1 + has_minimum) + BLOCK * nbits // 8)

    def encode(self, states: torch.Tensor) -> torch.Tensor:
        (nbits, has_minimum), states, missing = self._form, self._rotate(states), -self.head_dim % BLOCK
        if missing:
            states = torch.cat([states, states[..., -1:].expand(*states.shape[:-1], missing)], dim=-1)
        blocks, most = states.unflatten(-1, (-1, BLOCK)), 2**nbits - 1
        if nbits == 8:
            scale = blocks.abs().amax(dim=-1, keepdim=True) / 127
            steps = blocks * _inverse(scale)
            # Halves go away from zero
            codes = (steps.abs() + 0.5).floor().copysign(steps)
            return torch.cat([bytes_of_halves(scale), codes.to(torch.int8).view(torch.uint8)], dim=-1).flatten(-2)
        if has_minimum:
            least = blocks.amin(dim=-1, keepdim=True)
            scale = (blocks.amax(dim=-1, keepdim=True) - least) / most
            codes = (blocks - least) * _inverse(scale) + 0.5
            head = [bytes_of_halves(scale), bytes_of_halves(least)]
        else:
            middle = 2 ** (nbits - 1)
            # The number that is farthest out, with its sign, is met exactly by the lowest code
            farthest = blocks.gather(-1, blocks.abs().argmax(dim=-1, keepdim=True))
            scale = farthest / -middle
            codes = blocks * _inverse(scale) + (middle + 0.5)
            head = [bytes_of_halves(scale)]
        whole = codes.floor().clamp(0, most).to(torch.uint8)
        if nbits == 5:
            # Neighbours in one byte
            head.append(pack((whole >> 4).unflatten(-1, (-1, 8)).mT.flatten(-2), 1))
        return torch.cat([*head, pack(whole & 15, 4)], dim=-1).flatten(-2)

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        (nbits, has_minimum), data = self._form, rows.unflatten(-1, (-(-self.head_dim // BLOCK), -1))
        scale, rest = halves_of_bytes(data[..., :_HALF_BYTES]), data[..., _HALF_BYTES:]
        if nbits == 8:
            return self._of_blocks(scale * rest.contiguous().view(torch.int8).float())
        if has_minimum:
            least, rest = halves_of_bytes(rest[..., :_HALF_BYTES]), rest[..., _HALF_BYTES:]
        codes = unpack(rest[..., -_NIBBLE_BYTES:], 4, BLOCK)
        if nbits == 5:
            codes = codes | (unpack(rest[..., :_FIFTH_BYTES], 1, BLOCK).unflatten(-1, (8, -1)).mT.flatten(-2) << 4)
        return self._of_blocks(
            codes.float() * scale + least if has_minimum else (codes.float() - 2 ** (nbits - 1)) * scale
        )

    def _of_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        return self._rotate(blocks.flatten(-2)[..., : self.head_dim])

    def _rotate(self, states: torch.Tensor) -> torch.Tensor:
        """Rotates states, or rotates them back: the matrix is its own inverse."""
        return rotate(states.unflatten(-1, (-1, self.rotation))).flatten(-2) if self.rotation else states


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale.abs() < torch.finfo(torch.float32).tiny, 0, 1 / scale)


def rotation_of(side: str, head_dim: int) -> int:
    """Returns the channels that llama.cpp rotates together of `"keys"` or `"values"`; 0 where it rotates none."""
    if head_dim % _VALUE_ROTATION:
        return 0
    return head_dim & -head_dim if side == "keys" else _VALUE_ROTATION
