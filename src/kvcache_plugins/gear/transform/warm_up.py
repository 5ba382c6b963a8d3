"""Kernels of rows compiled before the first token; see `gear.warm_up`, and there what is done with a layer."""

import functools
from collections.abc import Hashable, Iterable

from kvcache_plugins.codecs.rows import RowCodec
from kvcache_plugins.gear.warm_up import Sizes, exercise

from .layer import TransformLayer


def warm_up_rows(layers: Iterable[object], sizes: Sizes, *, is_captured: bool = False) -> None:
    """
    Compiles what those among `layers` run whose states are of some sizes, once a process; with `is_captured` what
    their captured steps run too.
    """
    shapes = [(sizes.num_heads, sizes.key_dim), (sizes.num_heads, sizes.value_dim)]
    for layer in layers:
        if not isinstance(layer, TransformLayer):
            continue
        codec, key = layer.fixed, (layer.kernel_kind(), sizes, is_captured)
        if key in _known_kinds() or isinstance(codec, RowCodec) and codec.head_shapes != shapes:
            continue
        empty = TransformLayer(layer.config, 0, None, layer.frequencies, codec)
        # A token of what may be padded is padding
        exercise(empty, sizes, layer.config.shortest_prompt + 1, layer.config.residual_length, is_captured=is_captured)
        _known_kinds().add(key)


@functools.cache
def _known_kinds() -> set[Hashable]:
    """What has been compiled for. Layers themselves are not kept, as they may have a calibration."""
    return set()
