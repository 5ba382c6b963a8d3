"""How the checks drive a model through a cache: through public doors only, so that nothing is assumed about storage.

Three rules make the checks fair to caches that lose precision and still able to fail:

- after an operation the cache must go on like one of the same kind that was built directly, to rounding;
- where exactness cannot be asked for (a history compressed at other boundaries), the allowed error is made of the
  cache's own error against `DynamicCache`, and is never more than half of what doing nothing would give;
- `generate` is compared with a loop of single forwards through the same kind of cache, and with `DynamicCache` token
  for token wherever the cache turns out to be exact.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel

from kvcache_plugins.models.cache_argument import as_argument

from .comparison import require, require_close


CacheMaker = Callable[[], Cache]
Check = Callable[["Subject"], None]

SHORT_CONTEXT = 12
"""Tokens of a prompt that a cache with any exact buffer at all keeps exact."""
LONG_CONTEXT = 230
"""Tokens of a prompt that is long enough to be compressed, and no multiple of any group."""
LONG_APPEND = 70
"""Tokens that fill a buffer of 64 when appended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """Drives a decoder through fresh caches of the kind that is checked, and of one that is right by definition."""

    model: PreTrainedModel
    make_cache: CacheMaker

    @property
    def dense(self) -> "Subject":
        """Subject whose cache is the reference, a `DynamicCache`."""
        return replace(self, make_cache=partial(DynamicCache, config=self.model.config))

    @property
    def rounding(self) -> float:
        """Distance between logits that rounding may make, in the dtype of the model."""
        return max(1e-4, 20 * torch.finfo(self.model.dtype).eps)

    def lossy_limit(self, noise: float, control: float) -> float:
        """
        Distance that is right where a cache cannot be exact: twice its own from `DynamicCache`, the `noise`, as two
        such errors may add up, and at most half of the `control`, the distance that doing nothing would give.
        """
        return max(self.rounding, min(2 * noise, control / 2))

    def prompt(self, length: int, seed: int) -> torch.Tensor:
        """A prompt `[1, length]` of random tokens."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(1, self._vocab_size, (1, length), generator=generator, device="cpu")
        return tokens.to(self.model.device)

    def rows(self, length: int, num_rows: int, seed: int) -> torch.Tensor:
        """A batch `[num_rows, length]` of different prompts."""
        return torch.cat([self.prompt(length, seed + row) for row in range(num_rows)])

    @torch.no_grad()
    def feed(self, cache: Cache, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Logits `[batch, new tokens, vocabulary]` of one forward. `mask` covers cached and new tokens."""
        options = {}
        if mask is not None:
            position_ids = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
            options = {"attention_mask": mask, "position_ids": position_ids}
        logits = self.model(tokens, **as_argument(cache), use_cache=True, **options).logits.float()
        real = logits if mask is None else logits[mask[:, -tokens.shape[1] :].bool()]
        require(bool(torch.isfinite(real).all()), "the logits are not finite")
        return logits

    def feed_each(self, cache: Cache, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """As `feed`, one forward a token. Here `mask` covers the cached tokens only."""
        logits = []
        for step in range(tokens.shape[1]):
            mask = _longer(mask)
            logits.append(self.feed(cache, tokens[:, step : step + 1], mask))
        return torch.cat(logits, dim=1)

    def require_alike(
        self, cache: Cache, expected: Cache, tokens: torch.Tensor, what: str, at_once: bool = False
    ) -> None:
        """Requires that two caches go on alike, to rounding, token by token or `at_once`."""
        feed = self.feed if at_once else self.feed_each
        require_close(feed(cache, tokens), feed(expected, tokens), self.rounding, what)

    def cache(self, *chunks: torch.Tensor) -> Cache:
        """A fresh cache that has seen `chunks`, one forward each, and records the past as if it may be cropped."""
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
        Decodes as `generate` should, greedily or drawing as it does: the prompt in `chunks`, then a forward a token.
        Returns tokens `[batch, steps]` and the logits `[batch, steps, vocabulary]` that they were picked from.
        """

        def pick(logits: torch.Tensor) -> torch.Tensor:
            return torch.multinomial(logits.softmax(dim=-1), 1) if is_sampled else logits.argmax(-1, keepdim=True)

        for chunk in chunks:
            logits = self.feed(cache, chunk, mask)[:, -1:]
        tokens, seen = [pick(logits[:, -1])], [logits]
        while len(tokens) < num_new_tokens:
            mask = _longer(mask)
            seen.append(self.feed(cache, tokens[-1], mask))
            tokens.append(pick(seen[-1][:, -1]))
        return torch.cat(tokens, dim=1), torch.cat(seen, dim=1)

    def follow(self, cache: Cache, chunks: tuple[torch.Tensor, ...], tokens: torch.Tensor) -> torch.Tensor:
        """The logits that `decode` would have picked from, had its picks been `tokens`, two at least."""
        for chunk in chunks:
            logits = self.feed(cache, chunk)[:, -1:]
        return torch.cat([logits, self.feed_each(cache, tokens[:, :-1])], dim=1)

    def generate(self, cache: Cache, tokens: torch.Tensor, num_new_tokens: int, **options: object) -> torch.Tensor:
        """The new tokens of `model.generate`, the model's own generation config aside: no early end, no warping."""
        plain = GenerationConfig(
            do_sample=False,
            eos_token_id=self._vocab_size,
            pad_token_id=0,
            max_new_tokens=num_new_tokens,
        )
        options.setdefault("attention_mask", torch.ones_like(tokens))
        with patch.object(self.model, "generation_config", plain):
            output = self.model.generate(tokens, **as_argument(cache), **options)  # type: ignore[operator]
        return output[:, tokens.shape[1] :]

    @property
    def _vocab_size(self) -> int:
        return self.model.config.get_text_config(decoder=True).vocab_size


def _longer(mask: torch.Tensor | None) -> torch.Tensor | None:
    return None if mask is None else torch.cat([mask, mask.new_ones(mask.shape[0], 1)], dim=1)


def record_calls(cache: Cache, name: str) -> list[tuple[tuple[Any, ...], int, Any]]:
    """Returns a list that fills with arguments, length before, and result of each call of a method from now on."""
    calls: list[tuple[tuple[Any, ...], int, Any]] = []
    method = getattr(cache, name)

    def recording(*args: Any, **kwargs: Any) -> Any:
        length = cache.get_seq_length()
        result = method(*args, **kwargs)
        calls.append((args, length, result))
        return result

    setattr(cache, name, recording)
    return calls


@dataclass(frozen=True, kw_only=True, slots=True)
class ContractCheck:
    """
    Describes an item of the contract: its row of the grid, what has to hold, and a function that raises otherwise.
    """

    name: str
    summary: str
    function: Callable[[Subject], None]
    on_hybrid: bool = False


CHECKS: list[ContractCheck] = []


def contract_check(summary: str, *, on_hybrid: bool = False) -> Callable[[Check], Check]:
    """Adds `check_some_name` to the contract as the item `some-name`. Arguments: see `ContractCheck`."""

    def add(function: Check) -> Check:
        name = function.__name__.removeprefix("check_").replace("_", "-")
        CHECKS.append(ContractCheck(name=name, summary=summary, function=function, on_hybrid=on_hybrid))
        return function

    return add
