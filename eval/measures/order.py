"""Distance of a cache's next-token distributions from the dense cache's, by the order in which its tokens came.

A document is read in one forward, after a short first turn, or in chunks; the tokens after it are scored. All orders
end with the same tokens, so that one dense forward is the reference of all. A cache that depended on tokens alone
would have the same KL in each.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from kvcache_plugins.console.results import memory_fields
from kvcache_plugins.eval import harness
from kvcache_plugins.reports.memory import measure_memory

from .fidelity import continuation_logits, fill_cache, score_logits


# Order that the others are compared with
WHOLE = "prompt"


def updates_of(order: str, length: int) -> list[int]:
    """
    List the tokens of each forward by which a document of `length` tokens is read: `prompt` is one forward, `turn:N`
    is N tokens and then the rest, `chunks:N` is N tokens at a time.
    """
    name, _, number = order.partition(":")
    if order == WHOLE:
        return [length]
    if name not in ("turn", "chunks") or not number.isdecimal() or not 0 < int(number) <= length:
        raise ValueError(
            f"`order` has to be `prompt`, `turn:N` or `chunks:N` with N up to {length}, but got {order!r}"
        )
    size = int(number)
    if name == "turn":
        return [each for each in (size, length - size) if each]
    return [min(size, length - start) for start in range(0, length, size)]


def cut_documents(
    texts: Sequence[tuple[torch.Tensor, Sequence[int]]],
    length: int,
    others: torch.Tensor | None,
    switch: int,
    num_windows: int = 1,
) -> list[torch.Tensor]:
    """
    Cut `num_windows` documents of `length` tokens from each text, one from the middle or several spread evenly. A text
    is its tokens and the special tokens that begin every text. With `others`, a document continues with these after
    `switch` tokens. Raise a `ValueError` if a text is too short.
    """
    documents = []
    for tokens, start_ids in texts:
        count = length if others is None else switch
        start = torch.tensor(start_ids, dtype=tokens.dtype, device="cpu")
        for number in range(num_windows):
            parts = [start, _cut(tokens, count - len(start_ids), number, num_windows)]
            if others is not None:
                parts.append(_cut(others, length - count, number, num_windows))
            documents.append(torch.cat(parts))
    return documents


def _cut(tokens: torch.Tensor, count: int, number: int, num_windows: int) -> torch.Tensor:
    """Cut window `number` of `num_windows`, with `count` tokens; windows are spread evenly over the text."""
    if not 0 < count <= tokens.numel():
        raise ValueError(f"a document takes {count} tokens of a text, but one has {tokens.numel()}")
    first = (tokens.numel() - count) * (2 * number + 1) // (2 * num_windows)
    return tokens[first : first + count]


def measure_orders(
    model: PreTrainedModel,
    windows: Sequence[torch.Tensor],
    factories: Mapping[str, harness.CacheFactory],
    orders: Sequence[str],
    *,
    length: int,
    chunk: int = 16,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Iterator[dict[str, Any]]:
    """
    Read the first `length` tokens of each window `[tokens]` in every order through fresh caches, and score the tokens
    after them, `chunk` a forward. Yield a row for each cache and order: mean `kl` of a token and by window, `kl_ratio`
    to the first order, and memory of the last cache after the document.
    """
    updates = {order: updates_of(order, length) for order in orders}
    reference = []
    for number, window in enumerate(windows, start=1):
        on_progress(f"dense, window {number} of {len(windows)}")
        dense = DynamicCache(config=model.config)
        fill_cache(model, window[:length], dense)
        reference.append(continuation_logits(model, window[length:-1], dense))
    for name, factory in factories.items():
        first = None
        for order, sizes in updates.items():
            kl, memory = [], None
            for number, (window, logits) in enumerate(zip(windows, reference, strict=True), start=1):
                on_progress(f"{name}, {order}, window {number} of {len(windows)}")
                cache = factory()
                harness.check_is_empty(cache)
                for part in window[:length].split(sizes):
                    list(harness.feed(model, part[None], cache, needs_logits=False))
                memory = measure_memory(cache)
                own = continuation_logits(model, window[length:-1], cache, chunk)
                score = score_logits(logits, own, window[length + 1 :])
                kl.append(score.kl / score.num_scored)
            assert memory is not None, "there is a window"
            mean = sum(kl) / len(kl)
            first = mean if first is None else first
            ratio = mean / first if first else None
            yield {
                "cache": name,
                "order": order,
                "kl": mean,
                "kl_ratio": ratio,
                "kl_by_window": kl,
                "memory_at_end": memory_fields(memory),
            }
