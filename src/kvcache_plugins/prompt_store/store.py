"""`PromptStore`: caches of prompts of which the beginning was read before, by whatever process.

Nothing that happens to a file ends a generation: what cannot be loaded is read by the model again, what cannot be
written is not kept, and a warning says so.
"""

from __future__ import annotations

import itertools
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from kvcache_plugins.advice.byte_sizes import parse_bytes
from kvcache_plugins.files.records import read_content, write_record
from kvcache_plugins.files.schema import unpack
from kvcache_plugins.gear import GEARCache
from kvcache_plugins.models.cache_argument import CACHE_NAMES, as_argument, find_cache, reading_options
from kvcache_plugins.models.reference_model import user_folder
from kvcache_plugins.option_checks import check_integer
from kvcache_plugins.packed.cache import PackedCache, makes_packed_cache
from kvcache_plugins.registry import create_cache, unwrap_model
from kvcache_plugins.transform_coding import TransformCodingCache
from kvcache_plugins.user_warnings import warn_user

from .blocks import (
    FORMAT,
    BlockHeader,
    GEARPromptCache,
    PromptBlock,
    PromptCache,
    TransformCodingPromptCache,
    block_length,
    prompt_keys,
    read_block,
    root_key,
)
from .folder import FOLDER_OWNER_ALONE, OWNER_ALONE, Lease, StoredFile, StoreFolder


DEFAULT_BLOCK_TOKENS = 256
DEFAULT_MAX_BYTES = "20GB"
# Of a block's file, beside its tensors
_DOCUMENT_BYTES = 64 * 1024
_COUNTERS = (
    *("prompts", "hits", "tokens_asked", "tokens_saved", "blocks_loaded", "bytes_loaded", "load_seconds"),
    *("blocks_kept", "bytes_kept", "keep_seconds", "blocks_damaged", "blocks_not_kept"),
)
# What says nothing of states that the tokens do not say
_KNOWN_INPUTS = {"attention_mask", *CACHE_NAMES, "position_ids", "logits_to_keep"}


def default_folder() -> Path:
    """Where prompts are kept if nobody says: in the user's cache folder."""
    return user_folder() / "prompts"


def _expanded(folder: str | Path) -> Path:
    try:
        return Path(folder).expanduser()
    except RuntimeError as error:
        raise ValueError(f"`folder` has to be named in full, as {folder} cannot be found: {error}") from error


class PromptStore:
    """
    Prompts that were read once, compressed, on disk: what any process has read of a prompt, no other reads again.

    A prompt is read in blocks of `block_tokens` tokens. The tokens that a block adds to a `TransformCodingCache` or a
    `GEARCache` are a file, whose name follows from the model, the cache's options and all tokens up to the block's
    end. So prompts that begin alike share the files of what they have in
    common, and a cache that comes from the store equals, bit for bit, the one that reading the prompt in the same
    blocks makes. It differs from one that was filled in one go as any cache does that was filled in several: later
    tokens have attended to compressed ones.

    Several processes may use a folder at once. Files are written whole or not at all, readable by their owner alone
    and checked before anything of them is used; a damaged one is removed with a warning, and its tokens are read
    again. When there is no room on the disk, a warning says so and generation goes on.

    Args:
        folder (`str` or `Path`, *optional*): where the files are; by default in the user's cache folder.
        max_bytes (`int` or `str`, *optional*, defaults to `"20GB"`): the most that they take. The least recently used
            ones make room for others, but never those of a cache that is there. `None` is without a limit.
        block_tokens (`int`, *optional*, defaults to 256): tokens of a block; more if a cache needs more to compress a
            block as a prompt of its own (four times its `residual_length`, whole groups).

    Raises:
        ValueError: if an option is out of range, or the folder cannot be made.

    Example:

    ```python
    >>> from kvcache_plugins import PromptStore

    >>> store = PromptStore()
    >>> cache = store.read(model, document_ids)
    >>> for question_ids, fork in zip(questions, cache.fork(len(questions))):
    ...     model.generate(torch.cat([document_ids, question_ids], dim=1), past_key_values=fork)
    >>> model.generate(**inputs, custom_generate=store.generate)  # in one line
    ```
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        max_bytes: int | str | None = DEFAULT_MAX_BYTES,
        block_tokens: int = DEFAULT_BLOCK_TOKENS,
    ):
        check_integer("block_tokens", block_tokens, 1)
        self.block_tokens = block_tokens
        self.max_bytes = None if max_bytes is None else parse_bytes("max_bytes", max_bytes)
        self.folder = default_folder() if folder is None else _expanded(folder)
        self._files = StoreFolder(self.folder)
        self._counters: dict[str, int | float] = dict.fromkeys(_COUNTERS, 0)
        self._has_warned = False

    def stats(self) -> dict[str, int | float]:
        """
        What the store has done since it was made.

        Returns:
            `dict`: `prompts` that a cache was asked for, `hits` among them, `tokens_asked` and `tokens_saved`;
            `blocks_loaded`, `bytes_loaded` and `load_seconds`; `blocks_kept`, `bytes_kept` and `keep_seconds`;
            `blocks_damaged` and `blocks_not_kept`; and of the folder, whoever wrote to it, `bytes_on_disk`.
        """
        return {**self._counters, "bytes_on_disk": sum(file.num_bytes for file in self._files.files())}

    def cache_for(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        cache: str | PackedCache = "transform",
        **options: object,
    ) -> PromptCache:
        """
        A cache with the longest beginning of a prompt that is known. Nothing is computed.

        Args:
            model (`PreTrainedModel`): the model, itself or in a wrapper.
            input_ids (`torch.Tensor` of shape `[1, tokens]`): the prompt, of which a token at least is left to read.
            cache (`str`, `TransformCodingCache` or `GEARCache`, *optional*, defaults to `"transform"`): a preset of
                either class, with options as in `"gear:rank=8"`, or an empty cache whose options are used. Layers
                with a sliding window stay dense.
            options: override those of the name.

        Returns:
            `PromptCache`: also of the cache's class. The rest of the prompt can be kept if it is read in the same
            blocks: by `prefill`, or by `generate(..., prefill_chunk_size=cache.record.length)`.

        Raises:
            ValueError: if the prompt is a batch, or the cache none that can be kept.
        """
        token_ids = _token_ids(input_ids)
        return self._load(unwrap_model(model), token_ids, len(token_ids) - 1, cache, options)

    def read(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        cache: str | PackedCache = "transform",
        **options: object,
    ) -> PromptCache:
        """
        A cache with all of a prompt: what is known of it is loaded, and the rest is read by the model and kept. To be
        continued by tokens that follow, or by several prompts from `fork`. Everything is given as for `cache_for`.
        """
        token_ids = _token_ids(input_ids)
        made = self._load(unwrap_model(model), token_ids, len(token_ids), cache, options)
        self._read_blocks(model, made, input_ids, len(token_ids))
        if made.get_seq_length() < len(token_ids):
            _forward(model, made, input_ids)
        return made

    def prefill(self, model: torch.nn.Module, cache: PromptCache, input_ids: torch.Tensor) -> None:
        """
        Reads, block by block, what a cache of `cache_for` does not have of its prompt `[1, tokens]`, and keeps each
        block once it is read. What is left for `generate` is the last block, or the part of it that there is.
        """
        self._read_blocks(model, cache, input_ids, len(_token_ids(input_ids)) - 1)

    def keep(self, cache: PromptCache, input_ids: torch.Tensor) -> int:
        """
        Writes those blocks of a prompt `[1, tokens]` that a cache of this store was fed one by one, and that are not
        there yet; returns how many.

        Raises:
            ValueError: if the cache is none of this store's, or was fed its prompt in other pieces.
        """
        token_ids, record = _token_ids(input_ids), cache.record
        if record.store is not self:
            raise ValueError("`cache` has to be one that `cache_for` or `read` of this store returned, and no copy")
        length = record.length
        num_whole = min(cache.get_seq_length(), len(token_ids)) // length
        num_fed = min(record.num_blocks, num_whole)
        if num_whole and not num_fed:
            raise ValueError(
                f"`cache` was not fed its prompt in blocks of {length} tokens, and can only be kept in these: read it "
                f"by `prefill`, or by `generate(..., prefill_chunk_size={length})`"
            )
        keys = prompt_keys(record.root, token_ids[: num_fed * length], length)
        record.note_windows(cache.layers, cache.get_seq_length())
        missing = [number for number, key in enumerate(keys[1:]) if not self._files.path_of(key).exists()]
        if any(cache.is_sliding):
            # Windows that nobody noted have forgotten what they held
            missing = [number for number in missing if number in record.windows]
        blocks = cache.cut(keys, missing, token_ids)
        record.windows.clear()
        return self._write(keys[1:], blocks, record.lease) if blocks else 0

    def generate(
        self, model: PreTrainedModel, input_ids: torch.Tensor, spec: str | PackedCache = "transform", **arguments: Any
    ) -> Any:
        """
        For `model.generate(**inputs, custom_generate=store.generate, spec="gear-2bit")`: generates as always, by
        sampling or greedily, and reads of the prompt what the store does not have.

        Transformers hands no streamer to what it is given so: for one, `prefill` a cache and pass that.

        Args:
            spec (`str`, `TransformCodingCache` or `GEARCache`, *optional*, defaults to `"transform"`): the cache, as
                for `cache_for`; `cache` is an argument of Transformers since 5.24, which gives all others.
        """
        _check_inputs(arguments)
        made = self.cache_for(model, input_ids, spec)
        self.prefill(model, made, input_ids)
        return model._sample(input_ids, **{**arguments, **as_argument(made)})  # type: ignore[operator]

    def _load(
        self,
        model: PreTrainedModel,
        token_ids: list[int],
        most: int,
        cache: str | PackedCache,
        options: dict[str, object],
    ) -> PromptCache:
        made = self._empty_cache(model, cache, options)
        length = made.record.length
        root, *keys = prompt_keys(root_key(model, made, length), token_ids[:most], length)
        blocks, lease = self._read(keys)
        while blocks:
            try:
                made.fill(blocks, model.device)
                break
            except ValueError as error:
                # Its checksum is right: somebody has made it so
                blocks.pop()
                path = self._files.path_of(keys[len(blocks)])
                with suppress(OSError):
                    self._remove_damaged(path, path.stat().st_ino, f"`folder`: {path} is damaged: {error}")
                made = self._empty_cache(model, cache, options)
        made.record.store, made.record.root, made.record.lease = self, root, lease
        if lease is not None:
            weakref.finalize(made, lease.end)
        num_saved = len(blocks) * length
        self._count(prompts=1, hits=num_saved > 0, tokens_asked=len(token_ids), tokens_saved=num_saved)
        return made

    def _count(self, **counts: float) -> None:
        for name, count in counts.items():
            self._counters[name] += count

    def _read(self, keys: list[str]) -> tuple[list[PromptBlock], Lease | None]:
        """Reads the blocks of a prompt that are there and sound, from the first on, and takes a lease on them."""
        started, blocks = time.perf_counter(), []
        lease, damage = None, None
        try:
            with self._files.locked():
                known = list(itertools.takewhile(lambda key: self._files.path_of(key).exists(), keys))
                # Without room for a lease: blocks may go, once they are loaded
                with suppress(OSError):
                    lease = Lease(self.folder, known)
                self._files.touch(known)
                for key in known:
                    path = self._files.path_of(key)
                    status = path.stat()
                    try:
                        blocks.append(read_block(path))
                    except ValueError as error:
                        damage = path, status.st_ino, str(error)
                        break
                    self._count(blocks_loaded=1, bytes_loaded=status.st_size)
            if damage is not None:
                self._remove_damaged(*damage)
        except OSError as error:
            warn_user(f"the prompt store cannot be read: {error}")
        self._count(load_seconds=time.perf_counter() - started)
        return blocks, lease

    def _remove_damaged(self, path: Path, inode: int, reason: str) -> None:
        self._count(blocks_damaged=1)
        warn_user(f"{reason}; it is removed, and its tokens are read again")
        with self._files.locked(writing=True):
            # Somebody may have replaced it meanwhile
            if path.exists() and path.stat().st_ino == inode:
                path.unlink()

    def _write(self, keys: list[str], blocks: dict[int, PromptBlock], lease: Lease | None) -> int:
        """Writes blocks of a prompt by number, which the lease takes on; returns for how many there was room."""
        started, written = time.perf_counter(), 0
        try:
            with self._files.locked(writing=True):
                self._files.sweep()
                for number, block in sorted(blocks.items()):
                    num_bytes = block.num_bytes() + _DOCUMENT_BYTES
                    if self.max_bytes is not None and not self._files.make_room(num_bytes, self.max_bytes, keys):
                        self._warn_once(
                            f"`max_bytes` is {self.max_bytes}, and all that there is is in use: the prompt is read on "
                            "without being kept"
                        )
                        break
                    if lease is not None:
                        lease.add([keys[number]])
                    path = self._files.path_of(keys[number])
                    path.parent.mkdir(mode=FOLDER_OWNER_ALONE, exist_ok=True)
                    write_record(path, FORMAT, block, mode=OWNER_ALONE)
                    written += 1
                    self._count(bytes_kept=path.stat().st_size)
                self._files.touch(keys)
        except OSError as error:
            self._warn_once(f"the disk takes no more of the prompt, which is read on without being kept: {error}")
        seconds = time.perf_counter() - started
        self._count(blocks_kept=written, blocks_not_kept=len(blocks) - written, keep_seconds=seconds)
        return written

    def _warn_once(self, reason: str) -> None:
        if not self._has_warned:
            warn_user(reason)
        self._has_warned = True

    def _empty_cache(
        self, model: PreTrainedModel, cache: str | PackedCache, options: dict[str, object]
    ) -> PromptCache:
        found: Cache | str = cache
        if not isinstance(cache, str) and options:
            raise ValueError(f"`{min(options)}`: options are given with the name of a cache, not with a cache")
        if isinstance(cache, str) and makes_packed_cache(cache):
            found = create_cache(cache, model, **options)
        if not isinstance(found, PackedCache):
            raise ValueError(f"`cache` has to be a `TransformCodingCache` or a `GEARCache` but got {cache!r}")
        if found.get_seq_length():
            raise ValueError(f"`cache` has to be empty but holds {found.get_seq_length()} tokens")
        made = _as_prompt_cache(model, found)
        made.choice = found.choice
        made.record.length = block_length(made.cache_config, self.block_tokens)
        return made

    def _read_blocks(self, model: torch.nn.Module, cache: PromptCache, input_ids: torch.Tensor, most: int) -> None:
        length, held = cache.record.length, cache.get_seq_length()
        if held % length or cache.record.num_blocks * length != held:
            raise ValueError(f"`cache` has to hold whole blocks of {length} tokens and no more, but holds {held}")
        for stop in range(held + length, most + 1, length):
            _forward(model, cache, input_ids[:, :stop])
            self.keep(cache, input_ids[:, :stop])


def _as_prompt_cache(model: PreTrainedModel, cache: PackedCache) -> PromptCache:
    """Make an empty cache of blocks with the options of another cache."""
    options = cache.cache_config.to_options()
    if isinstance(cache, GEARCache):
        return GEARPromptCache(model, **options)
    if not isinstance(cache, TransformCodingCache) or cache.calibration is not None:
        raise ValueError("`cache` has to be without a `calibration` in a store, which does not keep it")
    if options["sliding"] == "compressed":
        raise ValueError('`sliding` has to be "auto" or "dense" in a store, as compressed windows drop blocks')
    return TransformCodingPromptCache(model, **{**options, "sliding": "dense"})


def _token_ids(input_ids: torch.Tensor) -> list[int]:
    if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2 or input_ids.shape[0] != 1:
        got = list(input_ids.shape) if isinstance(input_ids, torch.Tensor) else type(input_ids)
        raise ValueError(
            f"`input_ids` has to be one prompt of shape [1, tokens] but got {got}: of a batch, read each row by "
            "itself, without its padding"
        )
    if input_ids.shape[1] == 0:
        raise ValueError("`input_ids` has to hold a token at least")
    return input_ids[0].tolist()


def _check_inputs(model_kwargs: dict[str, Any]) -> None:
    given, mask = find_cache(model_kwargs), model_kwargs.get("attention_mask")
    if isinstance(given, Cache) and given.get_seq_length():
        raise ValueError("`past_key_values` holds tokens, but the store makes the cache: leave it out")
    if mask is not None and not bool(mask.all()):
        raise ValueError("`attention_mask` hides tokens, but the store knows prompts by all of their tokens")
    others = {name for name, value in model_kwargs.items() if isinstance(value, torch.Tensor)} - _KNOWN_INPUTS
    if others:
        raise ValueError(f"`{min(others)}` decides on states too, but the store knows prompts by their tokens alone")


@torch.no_grad()
def _forward(model: torch.nn.Module, cache: PromptCache, input_ids: torch.Tensor) -> None:
    """Has a cache take in those of the tokens that it does not hold."""
    inner = unwrap_model(model)
    input_ids = input_ids.to(inner.device)
    mask = torch.ones_like(input_ids)
    model(**reading_options(inner.forward, cache, input_ids, mask, input_ids.shape[1], needs_logits=False))


def list_prompts(path: Path) -> list[dict[str, Any]]:
    """
    Lists the prompts in a folder by their last blocks, those that were used last first; files that cannot be read are
    left out. Of a prompt `num_missing` blocks are gone, so what follows cannot be loaded; some of its bytes other
    prompts may share; `used_at` is in seconds since 1970.
    """
    folder, headers = _existing(path), dict[str, BlockHeader]()
    with folder.locked():
        files = {file.path.stem: file for file in folder.files()}
        for key, file in files.items():
            with suppress(ValueError, OSError):
                content = read_content(file.path, FORMAT)
                content.pop("layers", None)
                headers[key] = unpack(BlockHeader, content)
    followed = {header.previous for header in headers.values()}
    prompts = [_prompt_of(key, headers, files) for key in headers.keys() - followed]
    return sorted(prompts, key=lambda prompt: prompt["used_at"], reverse=True)


def find_damaged(path: Path, *, remove: bool = False) -> dict[Path, str]:
    """Finds, and may remove, the files of a folder that no cache is made of, each with what is wrong with it."""
    folder, damaged = _existing(path), {}
    with folder.locked(writing=remove):
        for file in folder.files():
            try:
                read_block(file.path)
            except ValueError as error:
                damaged[file.path] = str(error)
        if remove:
            for each in damaged:
                each.unlink(missing_ok=True)
            folder.sweep()
    return damaged


def clear(path: Path) -> tuple[int, int]:
    """Removes all blocks but those that are in use; returns how many and their bytes."""
    folder = _existing(path)
    with folder.locked(writing=True):
        folder.sweep()
        removed = {*folder.files()}
        folder.make_room(0, 0, ())
        removed -= {*folder.files()}
    return len(removed), sum(file.num_bytes for file in removed)


def _existing(path: Path) -> StoreFolder:
    if not (path / "blocks").is_dir():
        raise ValueError(f"`store`: {path} is no folder of a prompt store")
    return StoreFolder(path)


def _prompt_of(key: str, headers: dict[str, BlockHeader], files: dict[str, StoredFile]) -> dict[str, Any]:
    last, chain = headers[key], [key]
    while (previous := headers[chain[-1]].previous) in headers and headers[previous].start < headers[chain[-1]].start:
        chain.append(previous)
    num_blocks = last.start // max(len(last.token_ids), 1) + 1
    return {
        "key": key,
        "model_name": last.model_name,
        "options": last.options,
        "num_tokens": last.start + len(last.token_ids),
        "num_blocks": num_blocks,
        "num_missing": max(num_blocks - len(chain), 0),
        "num_bytes": sum(files[each].num_bytes for each in chain),
        # Others may use the blocks before it
        "used_at": files[key].used_at / 1e9,
    }
