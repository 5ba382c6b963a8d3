"""Keys in GEAR's codes, grouped along tokens as `kivi` groups them, that are scored and decoded by slot.

InfiniGen's own copy for scoring has one spread a channel for all tokens. That is enough to choose by. It is not enough
to attend with: after the rotary embedding slow channels drift along the sequence, out of the range of what was first
seen. Groups of consecutive tokens follow them.

Tokens that are added together are grouped from their end, so that a sequence has the same groups alone and
left-padded; what a first group lacks stays unused. So slots (tokens in order) and places (rows here) differ by a
shift, one for each run of tokens since the last time that tokens were dropped.

Legend: B batch, H key/value heads, D head dimension, K slots given.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F

from kvcache_plugins.codecs.groups import SideCodec
from kvcache_plugins.codecs.parts import KeyGroups
from kvcache_plugins.codecs.quantization import unpack
from kvcache_plugins.infinigen.scoring import ScoringStates
from kvcache_plugins.kernels.tokens import grouped_scores


class GroupedKeys(ScoringStates):
    """
    Keys of a layer in codes, with a step and a minimum for every channel of every group of tokens.

    Args:
        codec (`SideCodec`): what keys are compressed to: codes of 2, 4 or 8 bits alone, in groups of tokens.
    """

    # In groups, and less than elsewhere: spare ones are scored too
    growth = (1.125, 1)

    def __init__(self, codec: SideCodec):
        super().__init__()
        assert codec.grouping.group_size is not None
        self.codec, self.group_size = codec, codec.grouping.group_size
        self._num_groups = 0
        # First slot of every run of tokens, and how far behind its slot a token's place is
        self._runs: list[tuple[int, int]] = []
        self._groups: KeyGroups | None = None

    def append(self, encoded: Mapping[str, torch.Tensor]) -> None:
        count, used = self._num_encoded, self.length
        place = self._num_groups * self.group_size + -count % self.group_size
        if not self._runs or self._runs[-1][1] != place - self.length:
            self._runs.append((self.length, place - self.length))
        # Of rows here there is one for a group
        self.length = self._num_groups
        super().append(encoded)
        self._num_groups, self.length, self._groups = self.length, used + count, None

    def encode_groups(
        self, keys: torch.Tensor, valid: torch.Tensor | None = None
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """
        Compresses keys and stores nothing.

        Args:
            keys (`torch.Tensor` of shape `[B, H, tokens, D]`): the keys, any floating dtype.
            valid (`torch.Tensor` of shape `[B, tokens]`, *optional*): which of them may widen a range.

        Returns:
            Codes `[B, H, groups, tokens of a group, bytes]`, steps and minima `[B, H, groups, D]` by name, and whether
            they fit float16: see `SideCodec.encode`.
        """
        self._num_encoded = keys.shape[2]
        filling = -keys.shape[2] % self.group_size
        if filling:
            if valid is None:
                # With its data even where keys have none
                on = torch.device("cpu") if keys.is_meta else keys.device
                valid = torch.ones(keys.shape[0], keys.shape[2], dtype=torch.bool, device=on)
            keys, valid = F.pad(keys, (0, 0, filling, 0)), F.pad(valid, (filling, 0))
        states, fits = self.codec.encode(keys.unsqueeze(2), None if valid is None else valid.unsqueeze(1))
        codes = states.codes[:, :, 0].unflatten(2, (-1, self.group_size))
        return {"codes": codes, "scale": states.scale[:, :, 0], "zero": states.zero[:, :, 0]}, fits

    def scores(self, query: torch.Tensor) -> torch.Tensor:
        return grouped_scores(query, self.stored())

    def stored(self) -> KeyGroups:
        """
        All keys, the same object until any are added or dropped. Spare room is handed over too: codes would have to be
        copied without it.
        """
        if self._groups is None:
            stops = [first for first, _ in self._runs[1:]] + [self.length]
            runs = [(first, stop, shift) for (first, shift), stop in zip(self._runs, stops, strict=True)]
            self._groups = KeyGroups(**self.rows, nbits=self.codec.nbits, runs=runs)
        return self._groups

    def decode(self, slots: torch.Tensor) -> torch.Tensor:
        """The keys that the codes of slots `[B, H, K]` stand for, `[B, H, K, D]`, float32."""
        places, head_dim = self.stored().places_of(slots), self.rows["scale"].shape[3]
        codes = self.rows["codes"].flatten(2, 3)
        packed = codes.gather(2, places[..., None].expand(-1, -1, -1, codes.shape[3]))
        groups = (places // self.group_size)[..., None].expand(-1, -1, -1, head_dim)
        keys = unpack(packed, self.codec.nbits, head_dim).float()
        keys *= self.rows["scale"].gather(2, groups)
        keys += self.rows["zero"].gather(2, groups)
        return keys

    def truncate(self, length: int) -> None:
        """Forgets the keys from `length` on; what is left of a group keeps its codes, and nothing joins it."""
        if length >= self.length:
            return
        self._runs = [(first, shift) for first, shift in self._runs if first < length]
        self.length, self._groups = length, None
        self._num_groups = -(-(length + self._runs[-1][1]) // self.group_size) if self._runs else 0

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().map(function)
        self._groups = None

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for rows in self.rows.values():
            yield "scoring", rows[:, :, : self._num_groups]
            yield "spare", rows[:, :, self._num_groups :]
