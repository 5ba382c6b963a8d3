"""A hook of MkDocs: shows mkdocstrings the package as it is imported.

`eval/` and `triton_kernels/` lie beside `src/kvcache_plugins` and are imported as its subpackages (see `setup.cfg`),
which a reader of source files cannot know. So `build/docs/kvcache_plugins` is made of links to where things lie.
"""

import configparser
from contextlib import suppress
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[2]
TREE = ROOT / "build" / "docs"


def on_startup(**_: Any) -> None:
    """Called by MkDocs before any plugin sets to work: mkdocstrings ignores a folder that is not there by then."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    folders = dict(line.split(" = ") for line in setup["options"]["package_dir"].strip().splitlines())
    wanted = {entry.name: entry for entry in (ROOT / folders.pop("kvcache_plugins")).iterdir()}
    wanted |= {name.rpartition(".")[2]: ROOT / folder for name, folder in folders.items()}
    package = TREE / "kvcache_plugins"
    package.mkdir(parents=True, exist_ok=True)
    # Not made anew: another process may be reading them
    for link in package.iterdir():
        if link.name not in wanted:
            link.unlink(missing_ok=True)
    for name, place in wanted.items():
        with suppress(FileExistsError):
            (package / name).symlink_to(place)
