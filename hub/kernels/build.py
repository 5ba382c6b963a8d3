"""Build the repository of Triton's kernels for the kernel hub: `python hub/kernels/build.py FOLDER`."""

import hashlib
import json
import shutil
import sys
from pathlib import Path


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SOURCES = ROOT / "triton_kernels"


def build(folder: Path) -> None:
    """
    Write the repository: sources for `kernel-builder`, and builds that `kernels` loads.

    Args:
        folder (`Path`): the repository's folder; its builds and sources are replaced.
    """
    general = tomllib.loads((HERE / "build.toml").read_text(encoding="utf-8"))["general"]
    name = general["name"].replace("-", "_")
    paths = sorted(SOURCES.rglob("*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:12]
    builds = {backend: folder / "build" / f"torch-{backend}" for backend in general["backends"]}
    for target in (folder / "torch-ext" / name, *builds.values()):
        shutil.rmtree(target, ignore_errors=True)
        for path in paths:
            copy = target / path.relative_to(SOURCES)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    for backend, target in builds.items():
        metadata = {
            "name": general["name"],
            # A module of that name holds the kernels: one for each version and backend
            "id": f"_{name}_{backend}_{digest}",
            "version": general["version"],
            "license": general["license"],
            "python-depends": [],
            "backend": {"type": backend},
        }
        (target / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    for path in (HERE / "build.toml", HERE / "README.md", ROOT / "LICENSE"):
        shutil.copyfile(path, folder / path.name)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    build(Path(sys.argv[1]))
