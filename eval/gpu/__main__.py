"""`python -m kvcache_plugins.eval.gpu`: the same as `kvcache-plugins bench gpu`."""

import typer

from kvcache_plugins.cli.bench.gpu import main


if __name__ == "__main__":
    typer.run(main)
