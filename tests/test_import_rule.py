"""The architecture's import rule, read from the source with `ast`: imports point one way, also under TYPE_CHECKING."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


PROJECT_ROOT = Path(__file__).resolve().parents[1]
ROOT_PACKAGE = "kvcache_plugins"
FOLDERS = {
    ROOT_PACKAGE: PROJECT_ROOT / "src" / "kvcache_plugins",
    f"{ROOT_PACKAGE}.triton_kernels": PROJECT_ROOT / "triton_kernels",
    f"{ROOT_PACKAGE}.eval": PROJECT_ROOT / "eval",
}
MAX_NUM_LINES = 400
Check = Callable[[dict[str, str]], list[str]]

# A unit is a module or package directly inside `kvcache_plugins`; it imports from its own tier and the tiers above.
METHODS = {"gear", "infinigen", "kv_runahead", "baselines"}
# Made of several methods, which do not know of each other
COMPOSITIONS = {"infinigen_gear"}
TIERS: tuple[set[str], ...] = (
    {"triton_kernels"},
    {"ops"},
    {"registry", "memory", "html", "lazy_states", "prompt_layer", "exact_buffer", "layer_types", "fingerprint"},
    {"reference_model", "transformers_caches"},
    METHODS,
    COMPOSITIONS,
    {"sizing", "recommendation", "guard"},
    {"__init__"},
    {"cli", "eval", "contract", "doctor"},
)
# Foreign packages that one unit alone may import, and those that a unit must not import.
ONLY_IN = {"lm_eval": "eval"}
NEVER_IN = {"transformers": "triton_kernels"}


def read_sources() -> dict[str, str]:
    """The source of every module of the project by its import name, a package under the name of its `__init__`."""
    sources = {}
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            name = ".".join([package, *path.relative_to(folder).with_suffix("").parts])
            sources[name] = path.read_text(encoding="utf-8")
    return sources


def unit_of(module: str) -> str:
    """`kvcache_plugins.gear.cache` belongs to `gear`; the root package is the unit `__init__`; commands are `cli`."""
    parts = module.split(".")
    if parts[-1] == "__main__":
        return "cli"
    return parts[1] if len(parts) > 1 else "__init__"


def imported_names(module: str, source: str) -> Iterator[str]:
    """Every absolute name that a module imports, wherever in the file it does so."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            anchor = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*anchor, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def resolve(name: str, modules: set[str]) -> str:
    """The module that an imported name stands in: `kvcache_plugins.GEARCache` in `kvcache_plugins.__init__`."""
    while name:
        for candidate in (name, f"{name}.__init__"):
            if candidate in modules:
                return candidate
        name = name.rpartition(".")[0]
    raise AssertionError("the root package is among the modules")


def import_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """For each module, the project's modules that it imports."""
    modules = {*sources, f"{ROOT_PACKAGE}.__init__"}
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        names = (name for name in imported_names(module, source) if name.split(".")[0] == ROOT_PACKAGE)
        graph[module] = {resolve(name, modules) for name in names} - {module}
    return graph


def find_order_violations(sources: dict[str, str]) -> list[str]:
    """The imports that go against the tiers, and the units that stand in none."""
    tier_of = {unit: index for index, tier in enumerate(TIERS) for unit in tier}
    unknown = {unit_of(module) for module in sources} - tier_of.keys()
    violations = [f"`{unit}` stands in no tier: place it in TIERS" for unit in sorted(unknown)]
    for module, imported in import_graph(sources).items():
        for target in sorted(imported):
            unit, target_unit = unit_of(module), unit_of(target)
            if unit == target_unit or {unit, target_unit} & unknown:
                continue
            if {unit, target_unit} <= METHODS:
                violations.append(f"{module} imports {target}: methods never import each other")
            elif tier_of[target_unit] > tier_of[unit]:
                violations.append(f"{module} imports {target}: `{target_unit}` stands after `{unit}`")
    return violations


def find_foreign_violations(sources: dict[str, str]) -> list[str]:
    """The imports of other people's packages where they do not belong."""
    violations = []
    for module, source in sources.items():
        for package in sorted({name.split(".")[0] for name in imported_names(module, source)}):
            if ONLY_IN.get(package, unit_of(module)) != unit_of(module):
                violations.append(f"{module} imports {package}: only `{ONLY_IN[package]}` may")
            if NEVER_IN.get(package) == unit_of(module):
                violations.append(f"{module} imports {package}: `{NEVER_IN[package]}` must not")
    return violations


def find_cycles(sources: dict[str, str]) -> list[str]:
    """The units that import each other, directly or through others; inside a unit files may refer to each other."""
    graph: dict[str, set[str]] = {unit_of(module): set() for module in sources}
    for module, imported in import_graph(sources).items():
        graph[unit_of(module)] |= {unit_of(target) for target in imported} - {unit_of(module)}
    # Units that import nothing of what is left are taken away until none is: what remains holds the cycles.
    while leaves := {unit for unit, imported in graph.items() if not imported & graph.keys()}:
        graph = {unit: imported for unit, imported in graph.items() if unit not in leaves}
    return [f"`{unit}` is in, or leads to, a cycle of imports" for unit in sorted(graph)]


def find_long_files(sources: dict[str, str]) -> list[str]:
    """The files of more lines than the style allows."""
    lengths = {module: len(source.splitlines()) for module, source in sources.items()}
    return [f"{module} has {length} lines" for module, length in lengths.items() if length > MAX_NUM_LINES]


CHECKS = (find_order_violations, find_foreign_violations, find_cycles, find_long_files)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_project_obeys(check: Check) -> None:
    assert check(read_sources()) == []


def test_tests_are_no_longer_than_allowed() -> None:
    paths = (PROJECT_ROOT / "tests").rglob("*.py")
    assert find_long_files({path.name: path.read_text(encoding="utf-8") for path in paths}) == []


def test_every_file_is_read() -> None:
    modules = read_sources().keys()
    assert {"kvcache_plugins.__init__", "kvcache_plugins.eval.__init__"} <= modules
    assert {"kvcache_plugins.ops.__init__", "kvcache_plugins.triton_kernels.__init__"} <= modules


# What a check must find: (check, {module: source}, part of the complaint).
BAD_EXAMPLES = {
    "upwards": (
        find_order_violations,
        {"kvcache_plugins.ops.x": "import kvcache_plugins.gear.cache", "kvcache_plugins.gear.cache": ""},
        "`gear` stands after `ops`",
    ),
    "relative": (
        find_order_violations,
        {"kvcache_plugins.ops.x": "from ..gear import cache", "kvcache_plugins.gear.cache": ""},
        "`gear` stands after `ops`",
    ),
    "relative-in-init": (
        find_order_violations,
        {"kvcache_plugins.ops.__init__": "from ..memory import measure", "kvcache_plugins.memory": ""},
        "`memory` stands after `ops`",
    ),
    "inside-a-function": (
        find_order_violations,
        {
            "kvcache_plugins.registry": "def f():\n    from kvcache_plugins.gear import C",
            "kvcache_plugins.gear.__init__": "",
        },
        "`gear` stands after `registry`",
    ),
    "type-checking": (
        find_order_violations,
        {
            "kvcache_plugins.memory": "if TYPE_CHECKING:\n    from kvcache_plugins.cli import app",
            "kvcache_plugins.cli": "",
        },
        "`cli` stands after `memory`",
    ),
    "from-the-root": (
        find_order_violations,
        {"kvcache_plugins.gear.cache": "from kvcache_plugins import create_cache"},
        "`__init__` stands after `gear`",
    ),
    "between-methods": (
        find_order_violations,
        {"kvcache_plugins.gear.cache": "import kvcache_plugins.baselines", "kvcache_plugins.baselines.__init__": ""},
        "methods never import each other",
    ),
    "unplaced": (find_order_violations, {"kvcache_plugins.utils": ""}, "`utils` stands in no tier"),
    "lm-eval-outside-eval": (
        find_foreign_violations,
        {"kvcache_plugins.cli": "from lm_eval.models import huggingface"},
        "only `eval` may",
    ),
    "transformers-in-kernels": (
        find_foreign_violations,
        {"kvcache_plugins.triton_kernels.x": "import transformers"},
        "`triton_kernels` must not",
    ),
    "cycle": (
        find_cycles,
        {
            "kvcache_plugins.memory": "from kvcache_plugins.registry import x",
            "kvcache_plugins.registry": "from kvcache_plugins.memory import y",
        },
        "cycle",
    ),
    "long-file": (find_long_files, {"kvcache_plugins.cli": "x = 1\n" * (MAX_NUM_LINES + 1)}, "has 401 lines"),
}


@pytest.mark.parametrize(("check", "sources", "complaint"), BAD_EXAMPLES.values(), ids=BAD_EXAMPLES.keys())
def test_check_can_fail(check: Check, sources: dict[str, str], complaint: str) -> None:
    assert any(complaint in violation for violation in check(sources))


def test_checks_accept_what_is_allowed() -> None:
    sources = {
        "kvcache_plugins.memory": "from kvcache_plugins.ops import quantization",
        "kvcache_plugins.registry": "from kvcache_plugins.memory import MemoryReport\nimport transformers",
        "kvcache_plugins.gear.cache": "from kvcache_plugins.gear.config import GEARConfig",
        "kvcache_plugins.gear.config": "from kvcache_plugins.registry import register_cache",
        "kvcache_plugins.__init__": "from kvcache_plugins.gear import cache",
        "kvcache_plugins.eval.tasks": "import lm_eval\nfrom kvcache_plugins import create_cache",
        "kvcache_plugins.ops.quantization": "",
    }
    assert [violation for check in CHECKS for violation in check(sources)] == []
