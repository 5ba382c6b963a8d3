"""`PromptStore`: caches of prompts whose beginning was read before, by this or another process.

Nothing that happens to a file ends a generation: tokens that cannot be loaded are read by the model again, blocks that
cannot be written are not kept, and a warning says so.
"""

from __future__ import annotations

import itertools
import time
import weakref
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import Cache, PreTrainedModel

from kvcache_plugins.advice.byte_sizes import parse_bytes
from kvcache_plugins.files.records import write_record
from kvcache_plugins.gear import GEARCache
from kvcache_plugins.models.cache_argument import CACHE_NAMES, as_argument, find_cache, reading_options
from kvcache_plugins.models.reference_model import user_folder
from kvcache_plugins.option_checks import check_integer
from kvcache_plugins.packed.cache import PackedCache, makes_packed_cache
from kvcache_plugins.registry import create_cache, unwrap_model
from kvcache_plugins.transform_coding import TransformCodingCache
from kvcache_plugins.user_warnings import warn_user

from .blocks import FORMAT, PromptBlock, block_length, prompt_keys, read_block, root_key
from .folder import FOLDER_OWNER_ALONE, OWNER_ALONE, Lease, StoreFolder
from .prompt_cache import GEARPromptCache, PromptCache, TransformCodingPromptCache, stored_options


if TYPE_CHECKING:
    from transformers.generation.utils import GenerateNonBeamOutput


DEFAULT_BLOCK_TOKENS = 256
DEFAULT_MAX_BYTES = "20GB"
# Bytes of a block's file beside its tensors, at most
_DOCUMENT_BYTES = 64 * 1024
_COUNTERS = (
    *("prompts", "hits", "tokens_asked", "tokens_saved", "blocks_loaded", "bytes_loaded", "load_seconds"),
    *("blocks_kept", "bytes_kept", "keep_seconds", "blocks_damaged", "blocks_not_kept"),
)
# Tensors among the arguments of `generate` that do not change the states of given tokens
_KNOWN_INPUTS = {"attention_mask", *CACHE_NAMES, "position_ids", "logits_to_keep"}


def default_folder() -> Path:
    """Return the default folder of prompts, in the user's cache folder."""
    return user_folder() / "prompts"


def _expanded(folder: object) -> Path:
    if not isinstance(folder, str | Path):
        raise ValueError(f"`folder` has to be a path but got {folder!r}")
    try:
        return Path(folder).expanduser()
    except RuntimeError as error:
        raise ValueError(f"`folder` has to be named in full, as {folder} cannot be found: {error}") from error


class PromptStore:
    """
    Compressed prompts on disk: tokens that one process has read, no process reads again.

    A prompt is read in blocks of `block_tokens` tokens. The tokens that a block adds to a `TransformCodingCache` or a
    `GEARCache` are a file, whose name follows from the model, the cache's options and all tokens up to the block's
    end. Prompts that begin alike share the files of their common beginning. A cache from the store equals, bit for
    bit, one that reads the prompt in the same blocks. A cache that reads the prompt at once differs, since its later
    tokens have not attended to compressed ones.

    Several processes may use a folder at once. Files are written whole or not at all, readable by their owner alone
    and checked before they are used; a damaged one is removed with a warning, and its tokens are read again. If the
    disk is full, a warning says so and generation continues.

    Args:
        folder (`str` or `Path`, *optional*): folder of the files; by default in the user's cache folder.
        max_bytes (`int` or `str`, *optional*, defaults to `"20GB"`): limit of all files. The least recently used are
            evicted, but never those of a cache in use. `None` is without a limit.
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
    ) -> None:
        check_integer("block_tokens", block_tokens, 1)
        self.block_tokens = block_tokens
        self.max_bytes = None if max_bytes is None else parse_bytes("max_bytes", max_bytes)
        self.folder = default_folder() if folder is None else _expanded(folder)
        self._files = StoreFolder(self.folder)
        self._counters: dict[str, int | float] = dict.fromkeys(_COUNTERS, 0)
        self._has_warned = False

    def stats(self) -> dict[str, int | float]:
        """
        Return counters since the store was made, and the bytes of the folder.

        Returns:
            `dict`: `prompts` that a cache was asked for, `hits` among them, `tokens_asked` and `tokens_saved`;
            `blocks_loaded`, `bytes_loaded` and `load_seconds`; `blocks_kept`, `bytes_kept` and `keep_seconds`;
            `blocks_damaged` and `blocks_not_kept`; and `bytes_on_disk`, which count files of all processes.
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
        Return a cache with the longest beginning of a prompt that is on disk. Nothing is computed.

        Args:
            model (`PreTrainedModel`): the model, itself or in a wrapper.
            input_ids (`torch.Tensor` of shape `[1, tokens]`): the prompt; its last token is never loaded.
            cache (`str`, `TransformCodingCache` or `GEARCache`, *optional*, defaults to `"transform"`): a preset of
                either class, with options as in `"gear:rank=8"`, or an empty cache whose options are used. Layers
                with a sliding window stay dense.
            options: override those of the name.

        Returns:
            `PromptCache`: an instance of the cache's class too. The rest of the prompt can be kept if it is read in
            the same blocks: by `prefill`, or by `generate(..., prefill_chunk_size=cache.record.length)`.

        Raises:
            ValueError: if the prompt is a batch, or the cache cannot be kept.
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
        Return a cache with all of a prompt: its beginning is loaded, and the rest is read by the model and kept. It
        can be continued, or forked for several continuations. Arguments are those of `cache_for`.
        """
        token_ids = _token_ids(input_ids)
        made = self._load(unwrap_model(model), token_ids, len(token_ids), cache, options)
        self._read_blocks(model, made, input_ids, len(token_ids))
        if made.get_seq_length() < len(token_ids):
            _forward(model, made, input_ids)
        return made

    def prefill(self, model: torch.nn.Module, cache: PromptCache, input_ids: torch.Tensor) -> None:
        """
        Read the rest of a prompt `[1, tokens]` into a cache of `cache_for`, and keep each block once it is read. The
        last block, whole or in part, remains for `generate`.
        """
        self._check_own(cache)
        self._read_blocks(model, cache, input_ids, len(_token_ids(input_ids)) - 1)

    def keep(self, cache: PromptCache, input_ids: torch.Tensor) -> int:
        """
        Write the blocks of a prompt `[1, tokens]` that a cache of this store has read one by one and that are not on
        disk yet; return their number.

        Raises:
            ValueError: if the cache is not from this store, or has read its prompt in other pieces.
        """
        self._check_own(cache)
        token_ids, record = _token_ids(input_ids), cache.record
        length = record.length
        num_whole = min(cache.get_seq_length(), len(token_ids)) // length
        num_read = min(record.num_blocks, num_whole)
        if num_whole and not num_read:
            raise ValueError(
                f"`cache` has not read its prompt in blocks of {length} tokens, and can only be kept in these: use "
                f"`prefill`, or `generate(..., prefill_chunk_size={length})`"
            )
        keys = prompt_keys(record.root, token_ids[: num_read * length], length)
        record.record_end(cache.layers, cache.get_seq_length())
        missing = [number for number, key in enumerate(keys[1:]) if not self.has_block(key)]
        if record.is_needed:
            # Other blocks' windows have evicted tokens, and their recurrences have gone on
            missing = [number for number in missing if number in record.ends]
        blocks = cache.cut(keys, missing, token_ids)
        record.ends.clear()
        return self.write_blocks(keys[1:], blocks, record.lease) if blocks else 0

    def generate(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        spec: str | PackedCache = "transform",
        **arguments: object,
    ) -> torch.Tensor | GenerateNonBeamOutput:
        """
        Generate with the store: `model.generate(**inputs, custom_generate=store.generate, spec="gear-2bit")` samples
        or decodes greedily as without it, and reads only the part of the prompt that is not on disk.

        Transformers passes no streamer to `custom_generate`: for one, `prefill` a cache and pass that.

        Args:
            spec (`str`, `TransformCodingCache` or `GEARCache`, *optional*, defaults to `"transform"`): the cache, as
                for `cache_for`; `cache` is an argument of Transformers since 5.24, which passes all others.
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
        """Make a cache, and load up to `most` tokens of a prompt into it."""
        made = self._empty_cache(model, cache, options)
        length = made.record.length
        root = root_key(model, type(made).__name__, stored_options(made), length)
        keys = prompt_keys(root, token_ids[:most], length)[1:]
        blocks, lease = self.read_blocks(keys)
        with ExitStack() as stack:
            if lease is not None:
                stack.callback(lease.end)
            while blocks:
                try:
                    made.fill(blocks, model.device)
                    break
                except ValueError as error:
                    # The checksum is right, so the file was forged
                    blocks.pop()
                    path = self._files.path_of(keys[len(blocks)])
                    with suppress(OSError):
                        self._remove_damaged(path, path.stat().st_ino, f"`folder`: {path} is damaged: {error}")
                    made = self._empty_cache(model, cache, options)
            # From here on the lease ends with the cache
            stack.pop_all()
        record = made.record
        record.store = self
        record.root = root
        record.lease = lease
        if lease is not None:
            weakref.finalize(made, lease.end)
        num_saved = len(blocks) * length
        self._count(prompts=1, hits=num_saved > 0, tokens_asked=len(token_ids), tokens_saved=num_saved)
        return made

    def _count(self, **counts: float) -> None:
        for name, count in counts.items():
            self._counters[name] += count

    def read_blocks(self, keys: list[str]) -> tuple[list[PromptBlock], Lease | None]:
        """Read the blocks of a prompt from the first on, up to a missing or damaged one, and take a lease on them."""
        started = time.perf_counter()
        blocks: list[PromptBlock] = []
        lease = None
        try:
            with self._files.locked():
                known = list(itertools.takewhile(lambda key: self._files.path_of(key).exists(), keys))
                # On a full disk there is no lease: blocks may be evicted once they are loaded
                with suppress(OSError):
                    lease = Lease(self.folder, known)
                self._files.touch(known)
                damage = self._read_files(known, blocks)
            if damage is not None:
                self._remove_damaged(*damage)
        except OSError as error:
            warn_user(f"the prompt store cannot be read: {error}")
        except BaseException:
            if lease is not None:
                lease.end()
            raise
        self._count(load_seconds=time.perf_counter() - started)
        return blocks, lease

    def _read_files(self, keys: list[str], blocks: list[PromptBlock]) -> tuple[Path, int, str] | None:
        """Append blocks to a list; return path, inode and reason of a damaged one, which is the last to be read."""
        for key in keys:
            path = self._files.path_of(key)
            status = path.stat()
            try:
                blocks.append(read_block(path))
            except ValueError as error:
                return path, status.st_ino, str(error)
            self._count(blocks_loaded=1, bytes_loaded=status.st_size)
        return None

    def _remove_damaged(self, path: Path, inode: int, reason: str) -> None:
        self._count(blocks_damaged=1)
        warn_user(f"{reason}; it is removed, and its tokens are read again")
        with self._files.locked(writing=True):
            # Another process may have replaced the file
            if path.exists() and path.stat().st_ino == inode:
                path.unlink()

    def has_block(self, key: str) -> bool:
        """Return true if a block is on disk."""
        return self._files.path_of(key).exists()

    def write_blocks(self, keys: list[str], blocks: dict[int, PromptBlock], lease: Lease | None) -> int:
        """Write blocks of a prompt by number, and add them to its lease; return the number that had room."""
        started = time.perf_counter()
        num_written = 0
        try:
            with self._files.locked(writing=True):
                self._files.sweep()
                for number, block in sorted(blocks.items()):
                    num_bytes = block.num_bytes() + _DOCUMENT_BYTES
                    if self.max_bytes is not None and not self._files.make_room(num_bytes, self.max_bytes, keys):
                        self._warn_once(
                            f"`max_bytes` is {self.max_bytes}, and all blocks on disk are in use: the rest of the "
                            "prompt is read without being kept"
                        )
                        break
                    if lease is not None:
                        lease.add([keys[number]])
                    path = self._files.path_of(keys[number])
                    path.parent.mkdir(mode=FOLDER_OWNER_ALONE, exist_ok=True)
                    write_record(path, FORMAT, block, mode=OWNER_ALONE)
                    num_written += 1
                    self._count(bytes_kept=path.stat().st_size)
                self._files.touch(keys)
        except OSError as error:
            self._warn_once(f"the disk takes no more of the prompt, whose rest is read without being kept: {error}")
        seconds = time.perf_counter() - started
        self._count(blocks_kept=num_written, blocks_not_kept=len(blocks) - num_written, keep_seconds=seconds)
        return num_written

    def _check_own(self, cache: object) -> None:
        if not isinstance(cache, PromptCache) or cache.record.store is not self:
            raise ValueError("`cache` has to be one that `cache_for` or `read` of this store returned, and no copy")

    def _warn_once(self, reason: str) -> None:
        if not self._has_warned:
            warn_user(reason)
        self._has_warned = True

    def _empty_cache(
        self, model: PreTrainedModel, cache: str | PackedCache, options: dict[str, object]
    ) -> PromptCache:
        """Make an empty cache of blocks, given a preset and options, or another empty cache."""
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
        """Read and keep whole blocks of a prompt, up to `most` tokens."""
        length, held = cache.record.length, cache.get_seq_length()
        if held % length or cache.record.num_blocks * length != held:
            raise ValueError(f"`cache` has to hold whole blocks of {length} tokens and no more, but holds {held}")
        for stop in range(held + length, most + 1, length):
            _forward(model, cache, input_ids[:, :stop])
            self.keep(cache, input_ids[:, :stop])


def _as_prompt_cache(model: PreTrainedModel, cache: PackedCache) -> PromptCache:
    """Make an empty cache of blocks with the options of another cache."""
    if cache._given_mask is not None and not bool(cache._given_mask.all()):
        raise ValueError("`attention_mask` of the cache hides tokens, but the store knows prompts by all their tokens")
    options, most = cache.cache_config.to_options(), cache._max_cache_len
    if isinstance(cache, GEARCache):
        return GEARPromptCache(model, **options, max_cache_len=most)
    if not isinstance(cache, TransformCodingCache):
        kind = type(cache).__name__
        raise ValueError(f"`cache` has to be a `TransformCodingCache` or a `GEARCache` but got a {kind}")
    if cache.calibration is not None:
        options = {**cache.cache_config.to_calibrated_options(), "calibration": cache.calibration}
    if options["sliding"] == "compressed":
        raise ValueError('`sliding` has to be "auto" or "dense" in a store, as compressed windows drop blocks')
    return TransformCodingPromptCache(model, **{**options, "sliding": "dense", "max_cache_len": most})


def _token_ids(input_ids: torch.Tensor) -> list[int]:
    if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2 or input_ids.shape[0] != 1:
        got = list(input_ids.shape) if isinstance(input_ids, torch.Tensor) else type(input_ids)
        raise ValueError(
            f"`input_ids` has to be one prompt of shape [1, tokens] but got {got}: read each sequence of a batch "
            "alone, without its padding"
        )
    if input_ids.shape[1] == 0:
        raise ValueError("`input_ids` has to hold a token at least")
    return input_ids[0].tolist()


def _check_inputs(arguments: dict[str, object]) -> None:
    """Raise a `ValueError` for arguments of `generate` that change the states of a prompt's tokens."""
    cache = find_cache(arguments)
    if isinstance(cache, Cache) and cache.get_seq_length():
        raise ValueError("`past_key_values` holds tokens, but the store makes the cache: leave it out")
    mask = arguments.get("attention_mask")
    if isinstance(mask, torch.Tensor) and not bool(mask.all()):
        raise ValueError("`attention_mask` hides tokens, but the store knows prompts by all of their tokens")
    others = {name for name, value in arguments.items() if isinstance(value, torch.Tensor)} - _KNOWN_INPUTS
    if others:
        raise ValueError(f"`{min(others)}` decides on states too, but the store knows prompts by their tokens alone")


@torch.no_grad()
def _forward(model: torch.nn.Module, cache: PromptCache, input_ids: torch.Tensor) -> None:
    """Fill a cache with those of the tokens that it does not hold."""
    inner = unwrap_model(model)
    input_ids = input_ids.to(inner.device)
    mask = torch.ones_like(input_ids)
    model(**reading_options(inner.forward, cache, input_ids, mask, input_ids.shape[1], needs_logits=False))
