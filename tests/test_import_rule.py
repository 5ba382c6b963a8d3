"""The architecture's import rule, read from the source with `ast`: imports point one way, also under TYPE_CHECKING."""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest


PROJECT_ROOT = Path(__file__).resolve().parents[1]
ROOT_PACKAGE = "kvcache_plugins"
FOLDERS = {
    ROOT_PACKAGE: PROJECT_ROOT / "src" / "kvcache_plugins",
    f"{ROOT_PACKAGE}.triton_kernels": PROJECT_ROOT / "triton_kernels",
    f"{ROOT_PACKAGE}.eval": PROJECT_ROOT / "eval",
}
Check = Callable[[dict[str, str]], list[str]]
_LAZY = re.compile(rf"{ROOT_PACKAGE}(\.\w+)+:\w+")

# A room is a module or package directly inside `kvcache_plugins`; it imports from its own floor and the floors below.
# Floors from the ground up.
METHODS = {"gear", "transform_coding", "infinigen", "kv_runahead", "baselines"}
FLOORS: tuple[set[str], ...] = (
    {"files", "option_checks", "lazy_imports", "user_warnings", "formats", "triton_kernels"},
    {"registry", "models"},
    {"kernels"},
    {"codecs"},
    {"layers"},
    {"reports"},
    {"packed"},
    {*METHODS, "contract", "custom_generate", "default_cache"},
    # Made of several methods, which do not know of each other
    {"infinigen_transform", "advice", "batching", "prompt_store"},
    {"__init__"},
    {"console"},
    {"eval", "serving"},
    # Options and help of all commands. It stands on `eval`, not in it: a command may measure, choose and show
    {"cli"},
)
# `eval/` is a house of its own.
EVAL_FLOORS: tuple[set[str], ...] = (
    {"context_tasks", "harness", "inexact_cache", "kernel_check", "media", "observers", "result_files", "rows"},
    {"continuations", "tables", "tiny_models"},
    {"benchmark", "figures"},
    {"measures", "families", "report", "runahead"},
    {"lm_eval_model"},
    {"tasks"},
    {"benchmarks", "sweep"},
    {"gpu", "promises"},
    {"commands"},
)
# Foreign packages that one unit alone may import, and all that a unit may import beside Python's own and itself.
ONLY_IN = {"lm_eval": "eval"}
ENGINE, TRITON = f"{ROOT_PACKAGE}.kernels.engine", f"{ROOT_PACKAGE}.kernels.triton"
ALL_OF = {"formats": {"torch"}, "triton_kernels": {"torch", "triton"}}


def read_sources() -> dict[str, str]:
    """The source of every module of the project by its import name, a package under the name of its `__init__`."""
    sources = {}
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            name = ".".join([package, *path.relative_to(folder).with_suffix("").parts])
            sources[name] = path.read_text(encoding="utf-8")
    return sources


def room_of(module: str) -> str:
    """`kvcache_plugins.gear.cache` is in `gear`; the root package is the room `__init__`; commands are `cli`."""
    parts = module.split(".")
    if parts[-1] == "__main__":
        return "cli"
    return parts[1] if len(parts) > 1 else "__init__"


def eval_room_of(module: str) -> str | None:
    """`kvcache_plugins.eval.gpu.plan` is in `gpu`; `None` outside `eval` and for what only starts it."""
    parts = module.split(".")
    if parts[1:2] != ["eval"] or parts[-1] == "__main__" or parts[2:] == ["__init__"]:
        return None
    return parts[2]


def imported_names(module: str, source: str) -> Iterator[str]:
    """Every absolute name that a module imports, wherever in the file it does so, or names as `module:attribute`."""
    for node in ast.walk(ast.parse(source)):
        # Imported when it is asked for: see `lazy_imports`
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _LAZY.fullmatch(node.value):
            yield node.value.replace(":", ".")
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
    """Return the project's modules that each module imports."""
    modules = {*sources, f"{ROOT_PACKAGE}.__init__"}
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        names = (name for name in imported_names(module, source) if name.split(".")[0] == ROOT_PACKAGE)
        graph[module] = {resolve(name, modules) for name in names} - {module}
    return graph


def find_order_violations(sources: dict[str, str]) -> list[str]:
    """The imports that go up, and the rooms that stand on no floor."""
    graph, violations = import_graph(sources), []
    imports = [(module, target) for module, imported in graph.items() for target in sorted(imported)]
    for place, floors in ((room_of, FLOORS), (eval_room_of, EVAL_FLOORS)):
        floor_of = {room: number for number, floor in enumerate(floors) for room in floor}
        unplaced = {*map(place, graph)} - floor_of.keys() - {None}
        violations += [f"`{room}` stands on no floor: place it in FLOORS or EVAL_FLOORS" for room in sorted(unplaced)]
        for module, target in imports:
            if floor_of.get(place(target), -1) > floor_of.get(place(module), len(floors)):
                violations.append(f"{module} imports {target}: `{place(target)}` stands above `{place(module)}`")
    for module, target in imports:
        if {room_of(module), room_of(target)} <= METHODS and room_of(module) != room_of(target):
            violations.append(f"{module} imports {target}: methods never import each other")
    return violations


def find_foreign_violations(sources: dict[str, str]) -> list[str]:
    """The imports of other people's packages where they do not belong."""
    violations = []
    for module, source in sources.items():
        for package in sorted({name.split(".")[0] for name in imported_names(module, source)}):
            if ONLY_IN.get(package, room_of(module)) != room_of(module):
                violations.append(f"{module} imports {package}: only `{ONLY_IN[package]}` may")
        for name in imported_names(module, source) if room_of(module) in ALL_OF else ():
            own, package = f"{ROOT_PACKAGE}.{room_of(module)}.", name.split(".")[0]
            if not f"{name}.".startswith(own) and package not in {*ALL_OF[room_of(module)], *sys.stdlib_module_names}:
                violations.append(f"{module} imports {name}: `{room_of(module)}` must not")
    return violations


def find_triton_violations(sources: dict[str, str]) -> list[str]:
    """The imports of Triton's kernels beside the one place that imports them late: Triton may not be installed."""
    return [
        f"{module} imports {target}: `kernels.engine.load_triton` may"
        for module, imported in import_graph(sources).items()
        for target in sorted(imported)
        if (target == TRITON and module != ENGINE)
        or (room_of(target) == "triton_kernels" and room_of(module) != "triton_kernels" and module != TRITON)
    ]


def find_cycles(sources: dict[str, str]) -> list[str]:
    """The circles of modules, and of rooms, that import each other, directly or through others: the first of each."""
    # Others import a package's public names from it, and the package imports them from its modules: no circle of jobs
    graph = {
        module: {target for target in imported if not target.endswith(".__init__")}
        for module, imported in import_graph(sources).items()
    }
    rooms: dict[str, set[str]] = {}
    for module, imported in graph.items():
        if (eval_room_of(module) or room_of(module)) != "cli":
            room = eval_room_of(module) or room_of(module)
            rooms.setdefault(room, set()).update({eval_room_of(each) or room_of(each) for each in imported} - {room})
    return [*_circle(graph), *_circle(rooms)]


def _circle(graph: dict[str, set[str]]) -> Iterator[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle = error.args[1][:0:-1]
        start = circle.index(min(circle))
        yield f"a circle of imports: {' -> '.join([*circle[start:], *circle[: start + 1]])}"


CHECKS = (find_order_violations, find_foreign_violations, find_triton_violations, find_cycles)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_imports_obey_the_rules(check: Check) -> None:
    assert check(read_sources()) == []


def test_every_file_is_read() -> None:
    modules = read_sources().keys()
    assert {"kvcache_plugins.__init__", "kvcache_plugins.eval.__init__"} <= modules
    assert {"kvcache_plugins.codecs.__init__", "kvcache_plugins.triton_kernels.__init__"} <= modules


# Violations: the check that must find each, modules of the package and their sources (@ is the package), and part of
# the complaint
ORDER, FOREIGN = find_order_violations, find_foreign_violations
BAD_EXAMPLES = {
    "upwards": (ORDER, {"codecs.x": "import @.gear.y", "gear.y": ""}, "`gear` stands above `codecs`"),
    "relative": (ORDER, {"codecs.__init__": "from ..reports import z", "reports.z": ""}, "`reports` stands above"),
    "in a function": (ORDER, {"registry": "def f():\n    from @.gear import C", "gear.__init__": ""}, "`gear` stands"),
    "for types": (ORDER, {"layers": "if TYPE_CHECKING:\n    from @.cli import app", "cli": ""}, "`cli` stands above"),
    "named": (ORDER, {"registry": 'load("@.gear.y:C")', "gear.y": ""}, "`gear` stands above `registry`"),
    "from the root": (ORDER, {"gear.x": "from @ import create_cache"}, "`__init__` stands above `gear`"),
    "methods": (ORDER, {"gear.x": "import @.baselines", "baselines.__init__": ""}, "methods never import each other"),
    "unplaced": (ORDER, {"utils": "", "eval.utils": ""}, "`utils` stands on no floor"),
    "in eval": (ORDER, {"eval.harness": "from @.eval.tasks import y", "eval.tasks": ""}, "`tasks` stands above"),
    "lm-eval": (FOREIGN, {"cli": "from lm_eval.models import y"}, "only `eval` may"),
    "in kernels": (FOREIGN, {"triton_kernels.x": "import transformers"}, "`triton_kernels` must not"),
    "codecs in kernels": (ORDER, {"kernels.x": "from @.codecs import y", "codecs.y": ""}, "`codecs` stands above"),
    "in formats": (FOREIGN, {"formats.x": "import transformers"}, "`formats` must not"),
    "kernels of Triton": (
        find_triton_violations,
        {"kernels.x": "def f():\n    from .triton import g", "kernels.triton": ""},
        "`kernels.engine.load_triton` may",
    ),
    "in the Triton folder": (
        find_triton_violations,
        {"layers.x": "def f():\n    import @.triton_kernels.y", "triton_kernels.y": ""},
        "`kernels.engine.load_triton` may",
    ),
    "of ours": (FOREIGN, {"triton_kernels.x": "from @.files import y", "files": ""}, "`triton_kernels` must not"),
    "circle of modules": (
        find_cycles,
        {"gear.x": "from .y import load", "gear.y": "if TYPE_CHECKING:\n    from .x import C"},
        "gear.x -> kvcache_plugins.gear.y -> kvcache_plugins.gear.x",
    ),
    "circle of rooms": (
        find_cycles,
        {"registry": "from @.models.a import x", "models.a": "", "models.b": "from @.registry import y"},
        "models -> registry -> models",
    ),
}
ALLOWED = {
    "reports.x": "from @.codecs import y\nimport transformers",
    "registry": "",
    "gear.x": "from @.gear.y import C",
    "gear.y": "from @.registry import register_cache",
    "__init__": "from @.gear import x",
    "eval.tasks": "import lm_eval\nfrom @ import create_cache",
    "codecs.y": "from @.kernels import z",
    "kernels.z": "import @.formats.w",
    "formats.w": "import torch",
    "kernels.engine": "def f():\n    from . import triton",
    "kernels.triton": "from @.triton_kernels import y",
    "triton_kernels.x": "import math\nimport triton.language as tl\nfrom .y import z",
    "triton_kernels.y": "",
}


def sources_of(example: dict[str, str]) -> dict[str, str]:
    return {f"{ROOT_PACKAGE}.{name}": source.replace("@", ROOT_PACKAGE) for name, source in example.items()}


@pytest.mark.parametrize(("check", "example", "complaint"), BAD_EXAMPLES.values(), ids=BAD_EXAMPLES.keys())
def test_forbidden_imports_are_detected(check: Check, example: dict[str, str], complaint: str) -> None:
    assert any(complaint in violation for violation in check(sources_of(example)))


def test_checks_accept_what_is_allowed() -> None:
    assert [violation for check in CHECKS for violation in check(sources_of(ALLOWED))] == []
