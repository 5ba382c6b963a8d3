"""`BlockCodec`: blocks of an engine's KV cache as bytes, and back.

Engines and stores of their caches (vLLM, SGLang, LMCache) move blocks of tokens `[layers, 2, tokens, heads, head_dim]`
from device to host, disk or another machine. The bytes of a block are all that is needed to read it with the same
options: rows, the tables that they are coded by, and exact tokens. They are a safetensors file with a checksum, of the
format `kvcache_plugins.engine_block`, whose version rises whenever bytes of a release cannot be read by another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from transformers import PreTrainedConfig

from kvcache_plugins.codecs.codec import Codec, CodecState, Sample
from kvcache_plugins.files.records import Format, dump_record, load_record
from kvcache_plugins.files.schema import FLOATS, Range, Stored
from kvcache_plugins.formats.positions import Positions
from kvcache_plugins.formats.rotary import NOT_ROTATED
from kvcache_plugins.kernels.ops import to_dtype
from kvcache_plugins.models.rotary_frequencies import rotary_embedding
from kvcache_plugins.option_checks import check_integer, split_nbits
from kvcache_plugins.registry import get_config

from .config import DEFAULT_NBITS, MIN_TOKENS, PromptCodecs, TransformCodingConfig


FORMAT = Format("kvcache_plugins.engine_block", 1, "pack the block anew")
_ROWS = "heads", "num_rows"
# Largest number of states: scales are float16
_LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class PackedLayer:
    """Tokens of one layer behind the exact ones: tables, and rows `[1, heads, tokens, bytes]` of keys and values."""

    tables: CodecState
    keys: Annotated[torch.Tensor, Stored((1, *_ROWS, None), torch.uint8)]
    values: Annotated[torch.Tensor, Stored((1, *_ROWS, None), torch.uint8)]


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class PackedBlock:
    """
    Content of a block's bytes.

    Attributes:
        options (`dict`): options of the codec, which has to have the same to read it.
        start (`int`): position of the first token.
        dtype (`torch.dtype`): dtype of the states.
        num_tokens, heads, head_dim (`int`): sizes.
        exact (`torch.Tensor`): states of the first tokens of all layers, `[layers, 2, tokens, heads, head_dim]`.
        layers (`list[PackedLayer]`): the other tokens of all layers; empty if there are none.
    """

    options: dict[str, float]
    start: int
    dtype: torch.dtype
    num_tokens: Annotated[int, Range(1)]
    heads: Annotated[int, Range(1, 2**16)]
    head_dim: Annotated[int, Range(1, 2**16)]
    exact: Annotated[torch.Tensor, Stored((None, 2, None, "heads", "head_dim"), *FLOATS.values(), is_finite=False)]
    layers: list[PackedLayer]


class BlockCodec:
    """
    Packs blocks of a KV cache to bytes, and back, by transform coding: on a CPU or a GPU, in any floating dtype.

    The interface is stable: `pack` and `unpack` keep their arguments, and a release reads all versions of bytes that
    its `Format` names. Keys are those behind the rotary embedding, as engines store them.

    Args:
        config (`PreTrainedConfig` or `PreTrainedModel`, *optional*): the model. With it keys are coded before their
            rotary embedding, for which `pack` needs the position of a block.
        nbits, key_nbits, value_nbits (`float`, *optional*): bits of a channel, as in `TransformCodingCache`.
        num_sink_tokens (`int`, *optional*, defaults to 4): first tokens of a sequence that stay exact.

    Raises:
        ValueError: if an option is out of range.

    Example, an adapter in the form of LMCache's `Serializer` and `Deserializer`:

    ```python
    >>> class TransformSerde:
    ...     def __init__(self, config):
    ...         self.codec = BlockCodec(config)
    ...
    ...     def to_bytes(self, block):
    ...         return self.codec.pack(block)
    ...
    ...     def from_bytes(self, data):
    ...         return self.codec.unpack(data)
    ```
    """

    def __init__(
        self,
        config: PreTrainedConfig | torch.nn.Module | None = None,
        *,
        nbits: float | None = None,
        key_nbits: float | None = None,
        value_nbits: float | None = None,
        num_sink_tokens: int = 4,
    ) -> None:
        key_nbits, value_nbits = split_nbits(nbits, key_nbits, value_nbits, DEFAULT_NBITS)
        self._options = TransformCodingConfig(
            key_nbits=key_nbits, value_nbits=value_nbits, num_sink_tokens=num_sink_tokens
        )
        self._config = get_config(config, "config")

    @property
    def _own_options(self) -> dict[str, float]:
        options = self._options
        return {"key_nbits": options.key_nbits, "value_nbits": options.value_nbits}

    def pack(self, block: torch.Tensor, start: int = 0) -> bytes:
        """
        Pack a block `[layers, 2, tokens, heads, head_dim]` whose first token is at position `start` of its sequence.
        Blocks of fewer than 64 tokens stay exact, as tables need more.

        Raises:
            ValueError: for a block of another shape or dtype, and for states that are not finite or too large.
        """
        check_integer("start", start, 0)
        if not isinstance(block, torch.Tensor) or block.dim() != 5 or block.shape[1] != 2 or not block.numel():
            got = list(block.shape) if isinstance(block, torch.Tensor) else type(block)
            raise ValueError(f"`block` has to be of shape [layers, 2, tokens, heads, head_dim] but got {got}")
        if block.dtype not in FLOATS.values():
            raise ValueError(f"`block` has to be of {', '.join(FLOATS)} but is of {block.dtype}")
        if not bool((block.abs() <= _LARGEST).all()):
            raise ValueError(f"`block` holds NaN, infinity, or numbers above {_LARGEST:g}")
        num_exact = min(max(self._options.num_sink_tokens - start, 0), block.shape[2])
        if block.shape[2] - num_exact < MIN_TOKENS:
            num_exact = block.shape[2]
        coded = block[:, :, num_exact:]
        layers = [self._pack_layer(index, own, start + num_exact) for index, own in enumerate(coded) if own.numel()]
        packed = PackedBlock(
            options=self._own_options,
            start=start,
            dtype=block.dtype,
            num_tokens=block.shape[2],
            heads=block.shape[3],
            head_dim=block.shape[4],
            exact=block[:, :, :num_exact],
            layers=layers,
        )
        return dump_record(FORMAT, packed)

    def unpack(self, data: bytes, device: torch.device | str = "cpu") -> torch.Tensor:
        """
        Return the block of bytes that `pack` of a codec with the same options has made, in its dtype.

        Raises:
            ValueError: for bytes that are damaged, of another version, or of other options.
        """
        packed = load_record(data, FORMAT, PackedBlock)
        if packed.options != self._own_options:
            raise ValueError(f"`data` was packed with the options {packed.options}, not with {self._own_options}")
        num_exact, num_layers = packed.exact.shape[2], packed.exact.shape[0]
        num_rows = packed.layers[0].keys.shape[2] if packed.layers else 0
        is_whole = len(packed.layers) in (0, num_layers) and num_exact + num_rows == packed.num_tokens
        if packed.exact.dtype != packed.dtype or not is_whole:
            raise ValueError("`data` is damaged: its sizes or dtypes contradict each other")
        block = packed.exact.new_empty(num_layers, 2, packed.num_tokens, packed.heads, packed.head_dim).to(device)
        block[:, :, :num_exact] = packed.exact.to(device)
        for index, layer in enumerate(packed.layers):
            states = self._unpack_layer(index, layer, packed, num_exact, device)
            block[index, :, num_exact:] = to_dtype(states, packed.dtype)
        return block

    def _codec(self, layer_idx: int, head_dim: int) -> Codec:
        rotary = NOT_ROTATED if self._config is None else rotary_embedding(self._config, layer_idx)
        return PromptCodecs(self._options, rotary)(head_dim, head_dim)

    def _pack_layer(self, layer_idx: int, states: torch.Tensor, start: int) -> PackedLayer:
        """Pack the states `[2, T, H, D]` of a layer."""
        keys, values = states.transpose(1, 2)[:, None].contiguous()  # [1, H, T, D] each
        positions = Positions(start, None)
        valid = torch.ones(1, keys.shape[2], dtype=torch.bool, device=keys.device)
        sample = Sample(keys, values, valid, None, positions)
        codec = self._codec(layer_idx, keys.shape[3]).fit(sample)
        rows = codec.encode(keys, values, positions)
        overflow = codec.overflow(*rows)
        if overflow is not None and bool(overflow.any()):
            raise ValueError(f"`block` holds a token in layer {layer_idx} that is too large for its tables")
        tables = codec.with_bias_correction(rows, sample).state()
        assert tables is not None, "the codec is fitted"
        return PackedLayer(tables=tables, keys=rows[0], values=rows[1])

    def _unpack_layer(
        self, layer_idx: int, layer: PackedLayer, packed: PackedBlock, num_exact: int, device: torch.device | str
    ) -> torch.Tensor:
        """Return the states `[2, T, H, D]` of a layer."""
        codec = self._codec(layer_idx, packed.head_dim)
        wanted = [[1, packed.heads, packed.num_tokens - num_exact, size] for size in codec.row_sizes]
        if [list(layer.keys.shape), list(layer.values.shape)] != wanted:
            raise ValueError(f"`data` is damaged: layer {layer_idx} has rows of other sizes")
        codec = codec.restore(layer.tables, (1, packed.heads), f"layers.{layer_idx}.tables")
        codec = codec.map(lambda tensor: tensor.to(device))
        keys = codec.decode_keys(layer.keys.to(device), Positions(packed.start + num_exact, None))
        values = codec.decode_values(layer.values.to(device))
        return torch.cat((keys, values)).transpose(1, 2)
