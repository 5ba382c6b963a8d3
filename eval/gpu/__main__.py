"""`python -m kvcache_plugins.eval.gpu`: the same as `kvcache-plugins bench gpu`."""

import typer

from .command import run_on_gpu as main


if __name__ == "__main__":
    typer.run(main)
