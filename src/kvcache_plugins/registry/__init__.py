"""Caches by name: the one table that `create_cache`, the console script and the evaluations read.

A cache is registered as a class or another factory, `factory(model_or_config_or_None, **options) -> Cache`, and the
options that its name stands for. Options are checked against the factory's signature before it is called, so a
misspelt one is an error that names the accepted ones, never silently dropped. Registration is explicit: each method
registers its own names when it is imported, and third parties name theirs in the entry-point group
`kvcache_plugins.caches`, which is read on first use and whose code is loaded only when its cache is asked for. So is
that of a factory that is registered as `module:attribute`: names can be listed without Torch or Transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from .entries import (
    CUDA,
    ENTRY_POINT_GROUP,
    CacheEntry,
    CacheFactory,
    CacheRegistry,
    OptionCheck,
    first_line,
)
from .given_models import ModelOrConfig, WrappedOrConfig, get_config, unwrap_model
from .specs import OptionValue, parse_cache_spec, parse_option


if TYPE_CHECKING:
    from transformers import Cache


__all__ = [
    "CUDA",
    "ENTRY_POINT_GROUP",
    "CacheEntry",
    "CacheFactory",
    "CacheRegistry",
    "ModelOrConfig",
    "OptionValue",
    "WrappedOrConfig",
    "check_cache",
    "check_caches",
    "create_cache",
    "describe_caches",
    "get_config",
    "list_caches",
    "parse_cache_spec",
    "parse_option",
    "register_cache",
    "unwrap_model",
]

_REGISTRY = CacheRegistry()


def register_cache(
    name: str,
    factory: CacheFactory | str,
    *,
    summary: str | None = None,
    requires: str | None = None,
    check: OptionCheck | str | None = None,
    overwrite: bool = False,
    **preset_options: object,
) -> None:
    """
    Makes a cache known by name to `create_cache`, the console script and the evaluations.

    Args:
        name (`str`): A word such as `mine-4bit`.
        factory (`Callable` or `str`):
            Called as `factory(model, **options)` with a `PreTrainedModel`, a `PreTrainedConfig` or `None`; returns a
            fresh `Cache`, as the class itself does that takes any of the three first. Or `module:attribute`, which is
            imported when it is needed.
        summary (`str`, *optional*): One line for `kvcache-plugins list`; by default the factory's docstring's first.
        requires (`str`, *optional*): What has to be installed first, such as `hqq` or `hqq>=0.2`.
        check (`Callable` or `str`, *optional*):
            Called with all options by name before a command loads its model; raises a `ValueError` for a wrong value.
        overwrite (`bool`, *optional*, defaults to `False`): Whether a taken name is replaced instead of an error.
        preset_options: What the name stands for; a user's options override them.

    Example:

    ```python
    >>> from kvcache_plugins import create_cache, register_cache
    >>> register_cache("mine-4bit", create_my_cache, nbits=4)
    >>> model.generate(**inputs, past_key_values=create_cache("mine-4bit", model))
    ```
    """
    summary = first_line(factory) if summary is None else summary
    options = MappingProxyType(dict(preset_options))
    entry = CacheEntry(name=name, factory=factory, options=options, summary=summary, requires=requires, check=check)
    _REGISTRY.register(entry, overwrite=overwrite)


def check_cache(name: str, **options: object) -> CacheEntry:
    """
    The entry of a name, if a cache of it could be made, as far as can be told without a model.

    Raises:
        ValueError: for an unknown name or option, naming the known ones, or a value that no model makes right.
        ImportError: if what the cache needs is not installed.
    """
    name, options = _parsed(name, options)
    entry = _find_entry(name, options)
    entry.check_values(options)
    return entry


def check_caches(specs: Sequence[str]) -> list[str]:
    """`specs`, each once, if all of them are `name` or `name:key=value,key=value` and pass `check_cache`."""
    for spec in specs:
        parse_cache_spec(spec)
        check_cache(spec)
    return list(dict.fromkeys(specs))


def _parsed(name: str, options: Mapping[str, object]) -> tuple[str, dict[str, object]]:
    """A name without the options that are written behind it, and all options."""
    if not isinstance(name, str) or ":" not in name:
        return name, dict(options)
    name, own = parse_cache_spec(name)
    return name, {**own, **options}


def _find_entry(name: str, options: Mapping[str, object]) -> CacheEntry:
    if not isinstance(name, str):
        raise ValueError(
            f'`name` must be one of `list_caches()`, but got {type(name)}: write `create_cache("gear", model)`, the '
            "name first"
        )
    entry = _REGISTRY.entry(name)
    entry.check_options(options)
    # A factory that needs a device knows best what to say about it
    if not entry.is_available and entry.requires != CUDA:
        raise ImportError(f"The cache `{name}` needs `{entry.requires}`: `pip install '{entry.requires}'`.")
    return entry


def create_cache(name: str, model: WrappedOrConfig = None, **options: object) -> Cache:
    """
    Returns a fresh cache to pass as `past_key_values=`.

    Args:
        name (`str`): One of `list_caches()`, or with options behind it `name:key=value,key=value`. An unknown one
            raises a `ValueError` that lists the known ones.
        model (`PreTrainedModel` or `PreTrainedConfig`, *optional*):
            The model the cache is for, itself or in a wrapper such as a `PeftModel` or a compiled module. With it,
            sliding and hybrid models keep Transformers' own layers where a method does not apply; caches that cannot
            do without it say so.
        options: Override the preset's. An unknown one raises a `ValueError` that names the accepted ones.

    Example:

    ```python
    >>> from kvcache_plugins import create_cache
    >>> model.generate(**inputs, past_key_values=create_cache("gear-2bit", model, rank=8))
    ```
    """
    import torch
    from transformers import Cache

    name, options = _parsed(name, options)
    entry = _find_entry(name, options)
    model = unwrap_model(model) if isinstance(model, torch.nn.Module) else get_config(model)
    cache = entry.load_factory()(model, **{**entry.options, **options})
    if not isinstance(cache, Cache):
        raise TypeError(f"The factory of the cache `{name}` must return a Transformers `Cache`, but got {type(cache)}")
    return cache


def list_caches(pattern: str = "*") -> list[str]:
    """Names of the registered caches that match a shell pattern such as `gear*`, sorted."""
    return _REGISTRY.names(pattern)


def describe_caches(pattern: str = "*") -> list[CacheEntry]:
    """The entries of `list_caches(pattern)`. Third parties' that cannot be loaded are left out, with a warning."""
    return list(_REGISTRY.entries(pattern))
