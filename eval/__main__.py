"""`python -m kvcache_plugins.eval`: the same as `kvcache-plugins eval`."""

from kvcache_plugins.cli.evaluate import app


if __name__ == "__main__":
    app()
