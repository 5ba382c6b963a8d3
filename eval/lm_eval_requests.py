"""Requests of lm-eval: those that share a context together, and the cache that model arguments name."""

from collections.abc import Sequence
from typing import Any

from kvcache_plugins.registry import OptionValue, check_cache, parse_cache_spec, parse_option


# One request of lm-eval: its strings (or `None`), the tokens of the context and those of the continuation
Request = tuple[tuple[str, str] | None, list[int], list[int]]
# A context, and the numbers of the requests that have it
Group = tuple[tuple[int, ...], list[int]]


def group_by_context(requests: Sequence[tuple[list[int], list[int]]]) -> list[Group]:
    """
    Requests that share a context, which is then prefilled once; a single token is not worth sharing.

    The longest contexts come first: what does not fit, or what no context is long enough for, shows at once.
    """
    groups: dict[tuple[tuple[int, ...], int | None], list[int]] = {}
    for number, (context, _) in enumerate(requests):
        groups.setdefault((tuple(context), number if len(context) == 1 else None), []).append(number)

    def order(group: Group) -> tuple[int, int, tuple[int, ...]]:
        context, numbers = group
        return -len(context), -max(len(requests[number][1]) for number in numbers), context

    return sorted(((context, numbers) for (context, _), numbers in groups.items()), key=order)


def take_cache(spec: str, kwargs: dict[str, Any]) -> tuple[str, dict[str, OptionValue]]:
    """The cache's name and options; takes those that begin with `cache_` out of the model arguments."""
    name, options = parse_cache_spec(spec)
    # `cache_dir` is of `from_pretrained`
    for key in [key for key in kwargs if key.startswith("cache_") and key != "cache_dir"]:
        value = kwargs.pop(key)
        option = key.removeprefix("cache_")
        options[option] = parse_option(f"{option}={value}")[1] if isinstance(value, str) else value
    check_cache(name, **options)
    return name, options
