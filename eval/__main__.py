"""`python -m kvcache_plugins.eval`: the same as `kvcache-plugins eval`."""

from .evaluate import app


if __name__ == "__main__":
    app()
