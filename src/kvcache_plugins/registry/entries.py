"""The table of caches by name, with third parties' entry points read on first use."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from kvcache_plugins.lazy_imports import load
from kvcache_plugins.user_warnings import warn_user


if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from transformers import Cache


# Third parties name their factories in this group: the entry point's name is the cache's
ENTRY_POINT_GROUP = "kvcache_plugins.caches"
CUDA = "a CUDA device"
# What importing somebody else's module can raise. It must not take the other caches with it.
_LOADING_ERRORS = (ImportError, AttributeError, NameError, SyntaxError, TypeError, ValueError, RuntimeError, OSError)
CacheFactory: TypeAlias = "Callable[..., Cache]"
# Called with the options alone
OptionCheck: TypeAlias = Callable[..., object]


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheEntry:
    """
    One name of the registry.

    Args:
        name (`str`): The name that `create_cache` takes.
        factory (`Callable` or `str`):
            Called as `factory(model, **options)` with a model, its config or `None`. Or `module:attribute`, which is
            imported when it is needed.
        options (`Mapping`): What the name stands for: defaults that a user's options override.
        summary (`str`): One line for `kvcache-plugins list`.
        requires (`str`, *optional*): What to `pip install` first, such as `hqq` or `transformers>=5.21`, or `CUDA`.
        check (`Callable` or `str`, *optional*):
            Called with the options by name where there is no model yet; raises a `ValueError` for a value that no
            model would make right. Or `module:attribute`.
    """

    name: str
    factory: CacheFactory | str
    options: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    summary: str = ""
    requires: str | None = None
    check: OptionCheck | str | None = None

    def load_factory(self) -> CacheFactory:
        """The factory, imported if need be."""
        return load(self.factory) if isinstance(self.factory, str) else self.factory  # type: ignore[no-any-return]

    @property
    def is_available(self) -> bool:
        """Whether what the cache requires is there."""
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
        unknown = [] if accepted is None else [name for name in options if name not in accepted]
        if unknown:
            listed = ", ".join(f"`{name}`" for name in accepted or []) or "none"
            raise ValueError(
                f"Unknown option {', '.join(f'`{name}`' for name in unknown)} for the cache `{self.name}`."
                f"{_suggestion(unknown[0], accepted or [])} Accepted options: {listed}."
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
    close = difflib.get_close_matches(word, known, n=1)
    return f" Did you mean `{close[0]}`?" if close else ""


class CacheRegistry:
    """A table of `CacheEntry` by name, with third parties' entry points read on first use."""

    def __init__(self) -> None:
        self._entries: dict[str, CacheEntry] = {}
        self._entry_points: dict[str, EntryPoint] | None = None

    def register(self, entry: CacheEntry, overwrite: bool = False) -> None:
        """Adds `entry`. A taken name raises a `ValueError` unless `overwrite`."""
        if not entry.name or any(character in entry.name for character in ":,* \t\n"):
            raise ValueError(f"A cache's name must be a word without `:`, `,`, `*` or spaces, but got `{entry.name}`")
        is_named = isinstance(entry.factory, str) and entry.factory.count(":") == 1
        if not is_named and not callable(entry.factory):
            raise ValueError(
                f"`factory` of the cache `{entry.name}` must be callable, or be named as `module:attribute`, but got "
                f"{entry.factory!r}"
            )
        if not overwrite and entry.name in self._entries:
            raise ValueError(
                f"A cache named `{entry.name}` is registered already. Choose another name or pass `overwrite=True`."
            )
        # What is named is not imported for it
        if not is_named:
            entry.check_options(entry.options)
        self._entries[entry.name] = entry

    def names(self, pattern: str = "*") -> list[str]:
        """Sorted names that match the shell pattern. Nothing of a third party is imported for it."""
        return sorted(name for name in {*self._entries, *self._third_party()} if fnmatchcase(name, pattern))

    def entry(self, name: str) -> CacheEntry:
        """The entry of a name; a third party's code is loaded for it. Unknown names raise, listing the known ones."""
        if name in self._entries:
            return self._entries[name]
        if name not in self._third_party():
            known = self.names()
            listed = ", ".join(f"`{each}`" for each in known)
            raise ValueError(f"Unknown cache `{name}`.{_suggestion(name, known)} Known caches: {listed}.")
        point = self._third_party()[name]
        try:
            factory = point.load()
            self.register(CacheEntry(name=name, factory=factory, summary=first_line(factory)))
        except _LOADING_ERRORS as error:
            raise ImportError(f"The cache `{name}` of {_origin(point)} could not be loaded: {error!r}") from error
        return self._entries[name]

    def entries(self, pattern: str = "*") -> Iterator[CacheEntry]:
        """The entries whose names match. A third party's that cannot be loaded is left out, with a warning."""
        for name in self.names(pattern):
            try:
                yield self.entry(name)
            except ImportError as error:
                warn_user(f"Skipped: {error}")

    def _third_party(self) -> dict[str, EntryPoint]:
        if self._entry_points is None:
            from importlib.metadata import entry_points

            self._entry_points = {}
            for point in entry_points(group=ENTRY_POINT_GROUP):
                if point.name in self._entries or point.name in self._entry_points:
                    warn_user(f"The cache `{point.name}` of {_origin(point)} is ignored: taken name")
                else:
                    self._entry_points[point.name] = point
        return self._entry_points


def _origin(point: EntryPoint) -> str:
    package = f"the package `{point.dist.name}`" if point.dist is not None else "an unnamed package"
    return f"{package} (entry point `{point.value}`)"


def first_line(factory: CacheFactory | str) -> str:
    """First line of the factory's docstring, if it is there already."""
    if isinstance(factory, str):
        return ""
    return (inspect.getdoc(factory) or "").strip().partition("\n")[0]
