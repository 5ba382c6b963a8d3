"""Caches by name, for `create_cache`, the console script and the evaluations.

A name stands for a factory, `factory(model_or_config_or_None, **options) -> Cache`, and preset options. The user's
options are checked against the factory's signature. Methods register their names on import, third parties register
theirs in the entry-point group `kvcache_plugins.caches`. A factory may be given as `module:attribute`, which is
imported when the cache is created: names can be listed without Torch or Transformers.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from kvcache_plugins.lazy_imports import load
from kvcache_plugins.user_warnings import warn_user


if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    import torch
    from transformers import Cache, PreTrainedConfig, PreTrainedModel


# Entry points of third parties: the name is the cache's, the object its factory
ENTRY_POINT_GROUP = "kvcache_plugins.caches"
CUDA = "a CUDA device"
SEE_ALL_CACHES = "See `kvcache-plugins list`, or `list_caches()` in Python"
# `create_cache` checks that the object is a `Cache`
CacheFactory: TypeAlias = Callable[..., object]
OptionValue: TypeAlias = bool | int | float | str | None
ModelOrConfig: TypeAlias = "PreTrainedModel | PreTrainedConfig | None"
# The model may be wrapped, as in a `PeftModel`
WrappedOrConfig: TypeAlias = "torch.nn.Module | PreTrainedConfig | None"


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheEntry:
    """
    Registered name. `register_cache` explains the fields; `options` are the preset's, which a user's options override.
    """

    name: str
    factory: CacheFactory | str
    options: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    summary: str = ""
    requires: str | None = None
    check: Callable[..., object] | str | None = None

    def load_factory(self) -> CacheFactory:
        """Return the factory, imported if it is `module:attribute`."""
        return load(self.factory) if isinstance(self.factory, str) else self.factory

    @property
    def is_available(self) -> bool:
        """True if the required package or device is present."""
        if self.requires is None:
            return True
        if self.requires == CUDA:
            import torch

            return torch.cuda.is_available()
        from importlib.metadata import PackageNotFoundError, version

        from packaging.requirements import Requirement

        requirement = Requirement(self.requires)
        try:
            return requirement.specifier.contains(version(requirement.name), prereleases=True)
        except PackageNotFoundError:
            return False

    @property
    def accepted_options(self) -> list[str] | None:
        """Names of the factory's options; `None` if it takes any (`**kwargs`), and so checks them itself."""
        parameters = list(inspect.signature(self.load_factory()).parameters.values())[1:]
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return None
        return [parameter.name for parameter in parameters]

    def check_options(self, options: Mapping[str, object]) -> None:
        """Raise a `ValueError` that names the accepted options if one of `options` is not among them."""
        accepted = self.accepted_options
        unknown = [name for name in options if accepted is not None and name not in accepted]
        if unknown:
            named, listed = (", ".join(f"`{name}`" for name in names) for names in (unknown, accepted or []))
            raise ValueError(
                f"Unknown option {named} for the cache `{self.name}`.{_suggestion(unknown[0], accepted or [])} "
                f"Accepted options: {listed or 'none'}."
            )

    def check_values(self, options: Mapping[str, object]) -> None:
        """Raise a `ValueError` if one of the known `options` has a value that is wrong for every model."""
        check = load(self.check) if isinstance(self.check, str) else self.check
        if check is None:
            return
        try:
            check(**{**self.options, **options})
        except ValueError as error:
            raise ValueError(f"The cache `{self.name}`: {error}") from error


def _suggestion(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word.lower(), known)
    return f" Did you mean {' or '.join(f'`{each}`' for each in close)}?" if close else ""


# Former names, from when `GEARCache` and `TransformCodingCache` were one class
RENAMED_CACHES: Mapping[str, str] = MappingProxyType(
    {
        "gear-t25": "transform",
        **{f"gear-t{percent}": f"transform-{percent}" for percent in (16, 22, 30)},
        **{f"gear-c{percent}": f"calibrated-{percent}" for percent in (12, 16, 20, 28)},
        "infinigen-gear": "infinigen-transform",
    }
)
# A third party's entry is added when its cache is first used
_ENTRIES: dict[str, CacheEntry] = {}


@functools.cache
def _third_party() -> dict[str, EntryPoint]:
    """Read third parties' entry points by name, without loading their code."""
    from importlib.metadata import entry_points

    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name in _ENTRIES or point.name in found:
            warn_user(f"The cache `{point.name}` of {_origin(point)} is ignored: taken name")
        else:
            found[point.name] = point
    return found


def _origin(point: EntryPoint) -> str:
    package = f"the package `{point.dist.name}`" if point.dist is not None else "an unnamed package"
    return f"{package} (entry point `{point.value}`)"


def register_cache(
    name: str,
    factory: CacheFactory | str,
    *,
    summary: str | None = None,
    requires: str | None = None,
    check: Callable[..., object] | str | None = None,
    overwrite: bool = False,
    **preset_options: object,
) -> None:
    """
    Register a cache by name for `create_cache`, the console script and the evaluations.

    Args:
        name (`str`): a word such as `mine-4bit`.
        factory (`Callable` or `str`): function, or class, that returns a fresh `Cache`. It is called as
            `factory(model, **options)` with a `PreTrainedModel`, a `PreTrainedConfig` or `None`. A text
            `module:attribute` is imported when the cache is created.
        summary (`str`, *optional*): one line for `kvcache-plugins list`. Defaults to the first line of the factory's
            docstring.
        requires (`str`, *optional*): package that has to be installed, such as `hqq` or `hqq>=0.2`, or `CUDA`.
        check (`Callable` or `str`, *optional*): function that raises a `ValueError` for a wrong value. Commands call
            it with all options, by name, before they load a model.
        overwrite (`bool`, *optional*, defaults to `False`): replace a registered name instead of raising.
        preset_options: options that the name stands for; a user's options override them.

    Example:

    ```python
    >>> from kvcache_plugins import create_cache, register_cache
    >>> register_cache("mine-4bit", create_my_cache, nbits=4)
    >>> model.generate(**inputs, past_key_values=create_cache("mine-4bit", model))
    ```
    """
    if not name or any(character in name for character in ":,* \t\n"):
        raise ValueError(f"A cache's name must be a word without `:`, `,`, `*` or spaces, but got `{name}`")
    is_named = isinstance(factory, str) and factory.count(":") == 1
    if not is_named and not callable(factory):
        raise ValueError(
            f"`factory` of the cache `{name}` must be callable, or be named as `module:attribute`, but got {factory!r}"
        )
    if not overwrite and name in _ENTRIES:
        raise ValueError(
            f"A cache named `{name}` is registered already. Choose another name or pass `overwrite=True`."
        )
    # A factory given as text is not imported for its docstring
    if summary is None:
        summary = "" if is_named else (inspect.getdoc(factory) or "").partition("\n")[0]
    options = MappingProxyType(dict(preset_options))
    entry = CacheEntry(name=name, factory=factory, options=options, summary=summary, requires=requires, check=check)
    if not is_named:
        entry.check_options(options)
    _ENTRIES[name] = entry


def check_cache(name: str, **options: object) -> CacheEntry:
    """
    Return the entry of a name. Raise a `ValueError` for an unknown name, an unknown option or a value that is wrong
    for every model, and an `ImportError` for a missing package.
    """
    entry, options = _find_entry(name, options)
    entry.check_values(options)
    return entry


def check_caches(specs: Sequence[str]) -> list[str]:
    """Return `specs` without duplicates; each is `name` or `name:key=value,...` and has to pass `check_cache`."""
    for spec in specs:
        check_cache(spec)
    return list(dict.fromkeys(specs))


def _find_entry(name: str, options: dict[str, object]) -> tuple[CacheEntry, dict[str, object]]:
    """Return the entry of a name and all options, including those written behind the name."""
    if not isinstance(name, str):
        raise ValueError(
            f"`name` must be one of `list_caches()`, but got {type(name)}: write "
            '`create_cache("transform", model)`, the name first'
        )
    name, own = parse_cache_spec(name)
    options = {**own, **options}
    entry = _entry(name)
    entry.check_options(options)
    # The factory itself explains that a device is missing
    if not entry.is_available and entry.requires != CUDA:
        raise ImportError(f"The cache `{name}` needs `{entry.requires}`: `pip install '{entry.requires}'`.")
    return entry, options


def create_cache(name: str, model: WrappedOrConfig = None, **options: object) -> Cache:
    """
    Return a fresh cache, to pass as `past_key_values=`.

    Args:
        name (`str`): one of `list_caches()`, also with options behind it: `name:key=value,key=value`. An unknown name
            raises a `ValueError` that suggests similar ones.
        model (`PreTrainedModel` or `PreTrainedConfig`, *optional*):
            The model that the cache is for, also in a wrapper such as a `PeftModel` or a compiled module. With it,
            sliding and hybrid models keep Transformers' own layers where a method does not apply. Caches that need a
            model raise a `ValueError` without one.
        options: options that override the preset's. An unknown one raises a `ValueError` that names the accepted ones.

    Example:

    ```python
    >>> from kvcache_plugins import create_cache
    >>> model.generate(**inputs, past_key_values=create_cache("gear", model, rank=8))
    ```
    """
    import torch
    from transformers import Cache

    entry, options = _find_entry(name, options)
    model = unwrap_model(model) if isinstance(model, torch.nn.Module) else get_config(model)
    cache = entry.load_factory()(model, **{**entry.options, **options})
    if not isinstance(cache, Cache):
        raise TypeError(f"The factory of the cache `{name}` must return a Transformers `Cache`, but got {type(cache)}")
    return cache


def list_caches(pattern: str = "*") -> list[str]:
    """List the registered names that match a shell pattern such as `transform*`, sorted."""
    return sorted(name for name in {*_ENTRIES, *_third_party()} if fnmatchcase(name, pattern))


def describe_caches(pattern: str = "*") -> list[CacheEntry]:
    """List the entries of `list_caches(pattern)`; warn of a third party's cache that cannot be loaded, and skip it."""
    found = []
    for name in list_caches(pattern):
        try:
            found.append(_entry(name))
        except ImportError as error:
            warn_user(f"Skipped: {error}")
    return found


def _entry(name: str) -> CacheEntry:
    """Return the entry of a name, loading a third party's code; an unknown name raises, suggesting similar ones."""
    if name not in _ENTRIES:
        if name in RENAMED_CACHES:
            raise ValueError(f"The cache `{name}` has another name now: `{RENAMED_CACHES[name]}`")
        if name not in _third_party():
            raise ValueError(f"Unknown cache `{name}`.{_suggestion(name, list_caches())} {SEE_ALL_CACHES}.")
        point = _third_party()[name]
        try:
            register_cache(name, point.load())
        except Exception as error:
            raise ImportError(f"The cache `{name}` of {_origin(point)} could not be loaded: {error!r}") from error
    return _ENTRIES[name]


def parse_option(text: str) -> tuple[str, OptionValue]:
    """Parse `key=value`. The value is `none`, `true`, `false`, an integer or a float, or else stays text."""
    key, separator, value = (part.strip() for part in text.partition("="))
    if not separator or not key:
        raise ValueError(f"An option has the form `key=value`, but got `{text}`")
    constants = {"none": None, "true": True, "false": False}
    if value.lower() in constants:
        return key, constants[value.lower()]
    for number in (int, float):
        with suppress(ValueError):
            return key, number(value)
    return key, value


def parse_cache_spec(spec: str) -> tuple[str, dict[str, OptionValue]]:
    """Parse `name` or `name:key=value,key=value`, the form in which commands take a cache and its options."""
    name, colon, options = spec.partition(":")
    pairs = [parse_option(option) for option in options.split(",")] if options.strip() else []
    parsed = dict(pairs)
    if len(parsed) < len(pairs):
        raise ValueError(f"A cache has each option once, but got `{spec}`")
    is_divided_by_colon = re.search(r":\s*\w+=", options) is not None
    if not name.strip() or (colon and not parsed) or is_divided_by_colon:
        raise ValueError(f"A cache has the form `name` or `name:key=value,key=value`, but got `{spec}`")
    return name.strip(), parsed


def get_config(model: WrappedOrConfig, name: str = "model") -> PreTrainedConfig | None:
    """Return the config of a model or of what wraps it; errors call the argument `name`."""
    import torch
    from transformers import PreTrainedConfig

    if model is None or isinstance(model, PreTrainedConfig):
        return model
    if isinstance(model, torch.nn.Module):
        return unwrap_model(model).config
    hint = f"; options are given by their names, such as `nbits={model!r}`" if isinstance(model, int | float) else ""
    if isinstance(model, str):
        hint = f"; load it first, as by `AutoModelForCausalLM.from_pretrained({model!r})`"
        if model in list_caches():
            hint = f"; a cache is made by its name with `create_cache({model!r}, model)`"
    shown = repr(model) if hint else str(type(model))
    raise ValueError(f"`{name}` must be a `PreTrainedModel`, a `PreTrainedConfig` or `None`, but got {shown}{hint}")


def unwrap_model(model: torch.nn.Module) -> PreTrainedModel:
    """
    Return the `PreTrainedModel` that a module is or holds (a `PeftModel` holds one). Raise a `ValueError` if there is
    none, or for prefix tuning.
    """
    import torch
    from transformers import PreTrainedModel

    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    found = next((module for module in modules if isinstance(module, PreTrainedModel)), None)
    if found is None:
        raise ValueError(f"`model` must be a `PreTrainedModel` or a module that holds one, but got {type(model)}")
    peft_config = getattr(model, "active_peft_config", None)
    if peft_config is not None and peft_config.peft_type == "PREFIX_TUNING":
        raise ValueError(
            "`model`: prefix tuning is not supported, as PEFT puts the prefix into a `DynamicCache` of its own; "
            "adapters of weights (LoRA) and of the prompt's embeddings (prompt tuning) are"
        )
    return found
