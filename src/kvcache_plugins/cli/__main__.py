"""`python -m kvcache_plugins.cli`: the same as `kvcache-plugins`."""

from . import main


if __name__ == "__main__":
    main()
