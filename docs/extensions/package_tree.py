"""A hook of MkDocs: shows mkdocstrings the package as it is imported.

`eval/` and `triton_kernels/` lie beside `src/kvcache_plugins` and are imported as its subpackages (see `setup.cfg`),
which a reader of source files cannot know. So `build/docs/kvcache_plugins` is made of links to where things lie.
"""

import configparser
import shutil
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig


ROOT = Path(__file__).resolve().parents[2]
TREE = ROOT / "build" / "docs"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Called by MkDocs once its settings are read, before any page is."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    folders = dict(line.split(" = ") for line in setup["options"]["package_dir"].strip().splitlines())
    shutil.rmtree(TREE, ignore_errors=True)
    package = TREE / "kvcache_plugins"
    package.mkdir(parents=True)
    for entry in (ROOT / folders.pop("kvcache_plugins")).iterdir():
        (package / entry.name).symlink_to(entry)
    for name, folder in folders.items():
        (package / name.rpartition(".")[2]).symlink_to(ROOT / folder)
    return config
