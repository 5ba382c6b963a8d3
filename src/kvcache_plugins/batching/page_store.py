"""Pages of rows on disk: blocks of a `PromptStore`, one for each page of a request's beginning.

A block has the rows of its tokens in every layer, and the first one the exact sink tokens too. Its key follows from
the tables that rows are coded by. As in memory, a page that was read in other chunks has slightly other rows: the
first ones are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b

import torch
from transformers import PreTrainedModel

from kvcache_plugins.codecs.rows import RowCodec
from kvcache_plugins.layers.layer_state import LayerState
from kvcache_plugins.prompt_store.blocks import PromptBlock, prompt_keys, root_key
from kvcache_plugins.prompt_store.store import PromptStore


class PageStore:
    """
    Pages of a model in a prompt store.

    Args:
        store (`PromptStore`): the store.
        model (`PreTrainedModel`): the model.
        codecs (`Mapping[int, RowCodec]`): codecs of all layers.
        num_sink_tokens, num_recent_tokens (`int`): first and newest tokens of a request that stay exact.
    """

    def __init__(
        self,
        store: PromptStore,
        model: PreTrainedModel,
        codecs: Mapping[int, RowCodec],
        num_sink_tokens: int,
        num_recent_tokens: int,
    ) -> None:
        self._store = store
        self._model = model
        self._options: dict[str, object] = {
            "class": "pages",
            "tables": _digest(codecs),
            "num_sink_tokens": num_sink_tokens,
            "num_recent_tokens": num_recent_tokens,
        }
        # Keys before the first block, by the length of blocks: a digest of the whole model
        self._roots: dict[int, str] = {}

    def read(self, token_ids: Sequence[int], length: int, first: int, most: int) -> list[PromptBlock]:
        """Read up to `most` blocks of `length` tokens from number `first` on, up to one that is not on disk."""
        keys = self._keys(token_ids, length)
        blocks, lease = self._store.read_blocks(keys[first + 1 :][:most])
        if lease is not None:
            # Pages are copies
            lease.end()
        return blocks

    def write(self, token_ids: Sequence[int], length: int, states: Mapping[int, Sequence[LayerState | None]]) -> None:
        """Write the states of blocks by number, all layers of each, unless they are on disk."""
        keys = self._keys(token_ids, length)
        blocks = {
            number: PromptBlock(
                previous=keys[number],
                start=number * length,
                token_ids=list(token_ids[number * length : (number + 1) * length]),
                model_name=str(self._model.config.name_or_path),
                options=self._options,
                layers=list(layers),
            )
            for number, layers in states.items()
            if not self._store.has_block(keys[number + 1])
        }
        if blocks:
            self._store.write_blocks(keys[1:], blocks, None)

    def _keys(self, token_ids: Sequence[int], length: int) -> list[str]:
        if length not in self._roots:
            self._roots[length] = root_key(self._model, "pages", self._options, length)
        return prompt_keys(self._roots[length], token_ids, length)


def _digest(codecs: Mapping[int, RowCodec]) -> str:
    """Return the digest of the tables by which all layers code rows."""
    digest = blake2b(digest_size=32)
    for layer_idx, codec in sorted(codecs.items()):
        for table in codec.formats():
            for tensor in table.tensors():
                digest.update(f"{layer_idx} {tensor.dtype} {list(tensor.shape)}".encode())
                digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
