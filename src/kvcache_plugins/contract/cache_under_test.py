"""A model and caches of the kind under test, used through public methods alone, without assumptions about storage.

Three rules make the checks fair to lossy caches and still able to fail:

- After an operation a cache continues like one of the same kind that was built directly, up to rounding.
- Exactness cannot be required where a history was compressed at other boundaries. The allowed error is then derived
  from the cache's own error against `DynamicCache`, and is at most half of the error of skipping the operation.
- `generate` is compared with a loop of single forwards through the same kind of cache. If the cache turns out to be
  exact, its tokens also have to equal those of `DynamicCache`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel

from kvcache_plugins.models.cache_argument import as_argument

from .comparison import require, require_close


CacheMaker = Callable[[], Cache]

SHORT_CONTEXT = 12
"""Tokens of a prompt that every cache with an exact buffer keeps exact."""
LONG_CONTEXT = 230
"""Tokens of a prompt that is long enough to be compressed, and no multiple of any group."""
LONG_APPEND = 70
"""Tokens that fill a buffer of 64 when they are appended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheUnderTest:
    """A decoder, and a function that makes the caches to check. `dense` has the reference cache in their place."""

    model: PreTrainedModel
    make_cache: CacheMaker

    @property
    def dense(self) -> "CacheUnderTest":
        """The same model with the reference, a `DynamicCache`."""
        return replace(self, make_cache=partial(DynamicCache, config=self.model.config))

    @property
    def rounding(self) -> float:
        """Distance between logits that rounding may cause, in the dtype of the model."""
        return max(1e-4, 20 * torch.finfo(self.model.dtype).eps)

    def lossy_limit(self, noise: float, control: float) -> float:
        """
        Return the distance that is allowed where a cache cannot be exact: twice its own distance from `DynamicCache`,
        the `noise`, as two such errors may add up; and at most half of the `control`, the distance that skipping the
        operation would cause.
        """
        return max(self.rounding, min(2 * noise, control / 2))

    def prompt(self, length: int, seed: int) -> torch.Tensor:
        """Return a prompt `[1, length]` of random tokens."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(1, self._vocab_size, (1, length), generator=generator, device="cpu")
        return tokens.to(self.model.device)

    def prompts(self, length: int, num_sequences: int, seed: int) -> torch.Tensor:
        """Return a batch `[num_sequences, length]` of different prompts."""
        return torch.cat([self.prompt(length, seed + index) for index in range(num_sequences)])

    @torch.no_grad()
    def feed(self, cache: Cache, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits `[batch, new tokens, vocabulary]` of one forward. `mask` covers cached and new tokens."""
        options = {}
        if mask is not None:
            position_ids = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
            options = {"attention_mask": mask, "position_ids": position_ids}
        logits = self.model(tokens, **as_argument(cache), use_cache=True, **options).logits.float()
        real = logits if mask is None else logits[mask[:, -tokens.shape[1] :].bool()]
        require(bool(torch.isfinite(real).all()), "the logits are not finite")
        return logits

    def feed_each(self, cache: Cache, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits of one forward for each token. Here `mask` covers the cached tokens alone."""
        logits = []
        for step in range(tokens.shape[1]):
            mask = _extend_mask(mask)
            logits.append(self.feed(cache, tokens[:, step : step + 1], mask))
        return torch.cat(logits, dim=1)

    def require_alike(
        self, cache: Cache, expected: Cache, tokens: torch.Tensor, what: str, at_once: bool = False
    ) -> None:
        """Require equal logits of two caches up to rounding, token by token or `at_once`."""
        feed = self.feed if at_once else self.feed_each
        require_close(feed(cache, tokens), feed(expected, tokens), self.rounding, what)

    def cache(self, *chunks: torch.Tensor) -> Cache:
        """Return a fresh cache after one forward for each chunk, which records the past so that it can be cropped."""
        cache = self.make_cache()
        cache.activate_past_recording()
        for chunk in chunks:
            self.feed(cache, chunk)
        return cache

    def decode(
        self,
        cache: Cache,
        chunks: tuple[torch.Tensor, ...],
        num_new_tokens: int,
        *,
        is_sampled: bool = False,
        mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Decode like `generate`, greedily or by sampling: the prompt in `chunks`, then one forward for each token.
        Return tokens `[batch, steps]` and the logits `[batch, steps, vocabulary]` that they were picked from.
        """

        def pick(logits: torch.Tensor) -> torch.Tensor:
            return torch.multinomial(logits.softmax(dim=-1), 1) if is_sampled else logits.argmax(-1, keepdim=True)

        for chunk in chunks:
            logits = self.feed(cache, chunk, mask)[:, -1:]
        tokens, seen = [pick(logits[:, -1])], [logits]
        while len(tokens) < num_new_tokens:
            mask = _extend_mask(mask)
            seen.append(self.feed(cache, tokens[-1], mask))
            tokens.append(pick(seen[-1][:, -1]))
        return torch.cat(tokens, dim=1), torch.cat(seen, dim=1)

    def follow(self, cache: Cache, chunks: tuple[torch.Tensor, ...], tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of `decode` if it picks `tokens`, which are at least two."""
        for chunk in chunks:
            logits = self.feed(cache, chunk)[:, -1:]
        return torch.cat([logits, self.feed_each(cache, tokens[:, :-1])], dim=1)

    def generate(self, cache: Cache, tokens: torch.Tensor, num_new_tokens: int, **options: object) -> torch.Tensor:
        """Return the new tokens of `generate`, without the model's own generation config: no early end, no warping."""
        plain = GenerationConfig(
            do_sample=False,
            eos_token_id=self._vocab_size,
            pad_token_id=0,
            max_new_tokens=num_new_tokens,
        )
        options.setdefault("attention_mask", torch.ones_like(tokens))
        with _generation_config(self.model, plain):
            output = self.model.generate(tokens, **as_argument(cache), **options)  # type: ignore[operator]
        return output[:, tokens.shape[1] :]

    @property
    def _vocab_size(self) -> int:
        return self.model.config.get_text_config(decoder=True).vocab_size


def _extend_mask(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return a mask with one more token, which is no padding."""
    return None if mask is None else torch.cat([mask, mask.new_ones(mask.shape[0], 1)], dim=1)


@contextmanager
def _generation_config(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    original = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = original


@dataclass(frozen=True, kw_only=True, slots=True)
class ContractCheck:
    """
    Item of the contract.

    Attributes:
        name (`str`): its row of the grid.
        summary (`str`): the requirement.
        function (`Callable`): raises an error if the requirement is not met.
        on_hybrid (`bool`): run it on a model with a sliding-window layer.
    """

    name: str
    summary: str
    function: Callable[[CacheUnderTest], None]
    on_hybrid: bool = False
