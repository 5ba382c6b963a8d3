"""Packages that the project requires: there, of a supported version, and whether they can be imported."""

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module, metadata

from packaging.requirements import Requirement


DISTRIBUTION = "kvcache-plugins"
REQUIRED = "required"
# What each extra is for; the others are for those who work on the project
EXTRAS = {
    "reference": "converting the reference models",
    "peers": "the caches quanto-* and hqq-*",
    "eval": "lm-eval's tasks, figures",
}
_IMPORT_NAMES = {"optimum-quanto": "optimum.quanto"}
# What importing or running somebody else's code can raise; a library that cannot be loaded is an `OSError`
_FAILURES: tuple[type[Exception], ...] = (ImportError, AttributeError, NameError, TypeError, ValueError, OSError)
_FAILURES += (RuntimeError, LookupError, SyntaxError, AssertionError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """
    A package that the project requires.

    Args:
        name (`str`): As it is installed.
        needed_for (`str`): `REQUIRED`, or what an extra is for.
        version (`str`, *optional*): Of what is installed.
        status (`str`): `ok`, `missing`, `unsupported` (its version) or `broken` (it cannot be imported).
        detail (`str`, *optional*): Why it is not `ok`.
        advice (`str`, *optional*): What mends it.
    """

    name: str
    needed_for: str
    version: str | None
    status: str
    detail: str | None = None
    advice: str | None = None


def find_packages() -> Iterator[Package]:
    requirements = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or []]
    extras: dict[str, str] = {}
    for requirement in requirements:
        named = [extra for extra in EXTRAS if "extra" in str(requirement.marker) and _applies(requirement, extra)]
        if named:
            extras.setdefault(requirement.name, named[0])
    seen = set()
    for requirement in requirements:
        extra = extras.get(requirement.name)
        if requirement.name not in seen and (extra is not None or _applies(requirement, "")):
            seen.add(requirement.name)
            yield _package(requirement, REQUIRED if extra is None else EXTRAS[extra], extra)


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _package(requirement: Requirement, needed_for: str, extra: str | None) -> Package:
    name, wanted = requirement.name, f"{requirement.name}{requirement.specifier}"
    advice = f"pip install '{wanted}'" if extra is None else f"pip install '{DISTRIBUTION}[{extra}]'"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        detail = f"{wanted} is not installed"
        return Package(name=name, needed_for=needed_for, version=None, status="missing", detail=detail, advice=advice)
    if not requirement.specifier.contains(version, prereleases=True):
        status, detail = "unsupported", f"{wanted} is needed, but {version} is installed"
    elif (error := _import_error(_IMPORT_NAMES.get(name, name.replace("-", "_")))) is not None:
        status, detail, advice = "broken", error, f"pip install --force-reinstall '{wanted}'"
    else:
        return Package(name=name, needed_for=needed_for, version=version, status="ok")
    return Package(name=name, needed_for=needed_for, version=version, status=status, detail=detail, advice=advice)


def _import_error(module: str) -> str | None:
    with silence():
        return error_of(lambda: import_module(module))


def error_of(function: Callable[[], object]) -> str | None:
    """What a function raises, in one line, or `None`."""
    try:
        function()
    except _FAILURES as error:
        return " ".join(f"{type(error).__name__}: {error}".split())
    return None


@contextlib.contextmanager
def silence() -> Iterator[None]:
    # Packages that are imported greet, or warn of what is not this one's matter
    streams = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with streams[0], streams[1], warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
