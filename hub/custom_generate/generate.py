"""
`generate` with a compressed KV cache: `model.generate(..., custom_generate="<this repository>")` calls it, and so does
`model.generate` if this folder is in the model's own repository. The presets `calibrated-*` use a calibration of
transform coding beside the model's weights.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache as remember
from typing import Any

from transformers import DynamicCache, EncoderDecoderCache
from transformers.utils import cached_file

from kvcache_plugins import create_cache
from kvcache_plugins.models.cache_argument import as_argument


# Written by `kvcache-plugins calibrate --cache transform --out transform_calibration.safetensors`
CALIBRATION = "transform_calibration.safetensors"


def generate(
    *inputs: Any,
    model: Any,
    cache: str = "transform",
    cache_options: Mapping[str, object] | None = None,
    **arguments: Any,
) -> Any:
    """
    Run `model.generate` with a new cache; in encoder-decoders for the decoder's own tokens.

    Args:
        inputs: The positional argument that `generate` was called with.
        model: The model that `generate` was called on.
        cache (`str`, *optional*, defaults to `"transform"`): A name of `kvcache_plugins.list_caches()`.
        cache_options (`Mapping`, *optional*): Options of that cache.
        arguments: Everything else that `generate` was called with, a streamer and an assistant model included.

    Raises:
        ValueError: for an unknown cache or option, or if there is a cache in the arguments already.
    """
    others = [arguments.pop(name, None) for name in ("past_key_values", "cache_implementation")]
    if others != [None, None] or not isinstance(cache, str):
        raise ValueError("leave out `past_key_values` and `cache_implementation`: `cache` takes the name of a cache")
    options = dict(cache_options or {})
    if cache.startswith("calibrated-") and "calibration=" not in cache:
        found = find_calibration(model.name_or_path, getattr(model.config, "_commit_hash", None))
        options = options if found is None else {"calibration": found, **options}
    made = create_cache(cache, model, **options)
    given_cache = EncoderDecoderCache(made, DynamicCache()) if model.config.is_encoder_decoder else made
    # Hooks of a cache on the model end with the call
    with made if isinstance(made, AbstractContextManager) else nullcontext():
        # The method of the class, as the instance's is this function if it is in the model's repository
        return type(model).generate(model, *inputs, **arguments, **as_argument(given_cache))


@remember
def find_calibration(repository: str, revision: str | None) -> str | None:
    """Find the calibration beside a model's weights, in a folder or on the hub, which is asked once."""
    try:
        return cached_file(repository, CALIBRATION, revision=revision) if repository else None
    except OSError:
        return None
