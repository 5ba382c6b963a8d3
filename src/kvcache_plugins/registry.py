"""Caches by name: the one table that `create_cache`, the console script and the evaluations read.

A cache is registered as a class or another factory, `factory(model_or_config_or_None, **options) -> Cache`, and the
options that its name stands for; a user's are checked against its signature. Methods register their own names when
they are imported, third parties theirs in the entry-point group `kvcache_plugins.caches`. No code is loaded before its
cache is asked for where a factory is `module:attribute`: names can be listed without Torch or Transformers.
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


# Third parties name their factories in this group: the entry point's name is the cache's
ENTRY_POINT_GROUP = "kvcache_plugins.caches"
CUDA = "a CUDA device"
SEE_ALL_CACHES = "See `kvcache-plugins list`, or `list_caches()` in Python"
# What importing somebody else's module can raise. It must not take the other caches with it.
_LOADING_ERRORS = (ImportError, AttributeError, NameError, SyntaxError, TypeError, ValueError, RuntimeError, OSError)
CacheFactory: TypeAlias = "Callable[..., Cache]"
OptionValue: TypeAlias = bool | int | float | str | None
ModelOrConfig: TypeAlias = "PreTrainedModel | PreTrainedConfig | None"
# A model may also be wrapped
WrappedOrConfig: TypeAlias = "torch.nn.Module | PreTrainedConfig | None"


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheEntry:
    """Describes a name as `register_cache` does, with `options` as defaults that a user's options override."""

    name: str
    factory: CacheFactory | str
    options: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    summary: str = ""
    requires: str | None = None
    check: Callable[..., object] | str | None = None

    def load_factory(self) -> CacheFactory:
        """Returns the factory, imported if need be."""
        return load(self.factory) if isinstance(self.factory, str) else self.factory  # type: ignore[no-any-return]

    @property
    def is_available(self) -> bool:
        """Whether the requirement of the cache is there."""
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
        """Names of the factory's options; `None` where it takes any (`**kwargs`) and has to check them itself."""
        parameters = list(inspect.signature(self.load_factory()).parameters.values())[1:]
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return None
        return [parameter.name for parameter in parameters]

    def check_options(self, options: Mapping[str, object]) -> None:
        """Raises a `ValueError` naming the accepted options if one of `options` is not among them."""
        accepted = self.accepted_options
        unknown = [name for name in options if accepted is not None and name not in accepted]
        if unknown:
            named, listed = (", ".join(f"`{name}`" for name in names) for names in (unknown, accepted or []))
            raise ValueError(
                f"Unknown option {named} for the cache `{self.name}`.{_suggestion(unknown[0], accepted or [])} "
                f"Accepted options: {listed or 'none'}."
            )

    def check_values(self, options: Mapping[str, object]) -> None:
        """Raises a `ValueError` if one of `options`, which are known ones, has a value that no model makes right."""
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


# Names of before `GEARCache` and `TransformCodingCache` were two classes
RENAMED_CACHES: Mapping[str, str] = MappingProxyType(
    {
        "gear-t25": "transform",
        **{f"gear-t{percent}": f"transform-{percent}" for percent in (16, 22, 30)},
        **{f"gear-c{percent}": f"calibrated-{percent}" for percent in (12, 16, 20, 28)},
        "infinigen-gear": "infinigen-transform",
    }
)
# Those of third parties once they are asked for
_ENTRIES: dict[str, CacheEntry] = {}


@functools.cache
def _third_party() -> dict[str, EntryPoint]:
    """Reads third parties' entry points by name; none of their code is loaded for it."""
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
    Makes a cache known by name to `create_cache`, the console script and the evaluations.

    Args:
        name (`str`): A word such as `mine-4bit`.
        factory (`Callable` or `str`): Called as `factory(model, **options)` with a `PreTrainedModel`, a
            `PreTrainedConfig` or `None`; returns a fresh `Cache`, as the class itself does that takes any of the three
            first. Or `module:attribute`, which is imported when it is needed.
        summary (`str`, *optional*): One line for `kvcache-plugins list`; by default the factory's docstring's first.
        requires (`str`, *optional*): What has to be installed first, such as `hqq` or `hqq>=0.2`, or `CUDA`.
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
    # What is named is not imported for it
    if summary is None:
        summary = "" if is_named else (inspect.getdoc(factory) or "").partition("\n")[0]
    options = MappingProxyType(dict(preset_options))
    entry = CacheEntry(name=name, factory=factory, options=options, summary=summary, requires=requires, check=check)
    if not is_named:
        entry.check_options(options)
    _ENTRIES[name] = entry


def check_cache(name: str, **options: object) -> CacheEntry:
    """Finds a name's entry; what no model makes right is a `ValueError`, a missing package an `ImportError`."""
    entry, options = _find_entry(name, options)
    entry.check_values(options)
    return entry


def check_caches(specs: Sequence[str]) -> list[str]:
    """Returns `specs`, each once, if all are `name` or `name:key=value,key=value` and pass `check_cache`."""
    for spec in specs:
        check_cache(spec)
    return list(dict.fromkeys(specs))


def _find_entry(name: str, options: dict[str, object]) -> tuple[CacheEntry, dict[str, object]]:
    """Finds the entry of a name and all options, those that are written behind the name too."""
    if not isinstance(name, str):
        raise ValueError(
            f"`name` must be one of `list_caches()`, but got {type(name)}: write "
            '`create_cache("transform", model)`, the name first'
        )
    name, own = parse_cache_spec(name)
    options = {**own, **options}
    entry = _entry(name)
    entry.check_options(options)
    # A factory that needs a device knows best what to say about it
    if not entry.is_available and entry.requires != CUDA:
        raise ImportError(f"The cache `{name}` needs `{entry.requires}`: `pip install '{entry.requires}'`.")
    return entry, options


def create_cache(name: str, model: WrappedOrConfig = None, **options: object) -> Cache:
    """
    Returns a fresh cache to pass as `past_key_values=`.

    Args:
        name (`str`): One of `list_caches()`, or with options behind it `name:key=value,key=value`. An unknown one
            raises a `ValueError` that suggests similar ones.
        model (`PreTrainedModel` or `PreTrainedConfig`, *optional*):
            The model the cache is for, itself or in a wrapper such as a `PeftModel` or a compiled module. With it,
            sliding and hybrid models keep Transformers' own layers where a method does not apply; caches that cannot
            do without it say so.
        options: Override the preset's. An unknown one raises a `ValueError` that names the accepted ones.

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
    """Lists the names of the registered caches that match a shell pattern such as `transform*`, sorted."""
    return sorted(name for name in {*_ENTRIES, *_third_party()} if fnmatchcase(name, pattern))


def describe_caches(pattern: str = "*") -> list[CacheEntry]:
    """Lists the entries of `list_caches(pattern)`, without third parties' that cannot be loaded: a warning says so."""
    found = []
    for name in list_caches(pattern):
        try:
            found.append(_entry(name))
        except ImportError as error:
            warn_user(f"Skipped: {error}")
    return found


def _entry(name: str) -> CacheEntry:
    """Find a name's entry; a third party's code is loaded for it. Unknown names raise, suggesting similar ones."""
    if name not in _ENTRIES:
        if name in RENAMED_CACHES:
            raise ValueError(f"The cache `{name}` has another name now: `{RENAMED_CACHES[name]}`")
        if name not in _third_party():
            raise ValueError(f"Unknown cache `{name}`.{_suggestion(name, list_caches())} {SEE_ALL_CACHES}.")
        point = _third_party()[name]
        try:
            register_cache(name, point.load())
        except _LOADING_ERRORS as error:
            raise ImportError(f"The cache `{name}` of {_origin(point)} could not be loaded: {error!r}") from error
    return _ENTRIES[name]


def parse_option(text: str) -> tuple[str, OptionValue]:
    """Reads `key=value` with the value typed: `none`, `true`, `false`, an integer, a float, else the text itself."""
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
    """Reads `name` or `name:key=value,key=value`, as commands take a cache and its options; else a `ValueError`."""
    name, colon, options = spec.partition(":")
    parsed = dict(parse_option(option) for option in options.split(",")) if options.strip() else {}
    is_divided_by_colon = re.search(r":\s*\w+=", options) is not None
    if not name.strip() or (colon and not parsed) or is_divided_by_colon:
        raise ValueError(f"A cache has the form `name` or `name:key=value,key=value`, but got `{spec}`")
    return name.strip(), parsed


def get_config(model: WrappedOrConfig, name: str = "model") -> PreTrainedConfig | None:
    """Returns the config of what `create_cache`, or a cache's class as its argument `name`, was given."""
    import torch
    from transformers import PreTrainedConfig

    if model is None or isinstance(model, PreTrainedConfig):
        return model
    if isinstance(model, torch.nn.Module):
        return unwrap_model(model).config
    hint = f"; options are given by their names, such as `nbits={model!r}`" if isinstance(model, int | float) else ""
    if isinstance(model, str):
        hint = f"; a cache is made by its name with `create_cache({model!r}, model)`"
    shown = repr(model) if hint else str(type(model))
    raise ValueError(f"`{name}` must be a `PreTrainedModel`, a `PreTrainedConfig` or `None`, but got {shown}{hint}")


def unwrap_model(model: torch.nn.Module) -> PreTrainedModel:
    """Finds the model that a module is or holds, as a `PeftModel` does; none, or prefix tuning, is a `ValueError`."""
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
