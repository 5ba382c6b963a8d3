"""KV caches for Hugging Face Transformers: packed in few bits, in host memory, or filled by several processes.

```python
>>> from kvcache_plugins import GEARCache, TransformCodingCache, create_cache
>>> model.generate(**inputs, past_key_values=TransformCodingCache(model))
>>> model.generate(**inputs, past_key_values=GEARCache(model))
>>> model.generate(**inputs, past_key_values=create_cache("transform-16", model))
```

Importing this package is cheap: it registers the caches' names. Torch and Transformers are imported with the first
name that needs them.
"""

from typing import TYPE_CHECKING

# These packages register their caches
from . import baselines, gear, infinigen, infinigen_transform, transform_coding  # noqa: F401
from .lazy_imports import lazy_attributes
from .registry import create_cache, list_caches, register_cache


if TYPE_CHECKING:
    from .advice.choose_by_kl import choose_cache as choose_cache
    from .advice.choose_by_kl import measure_kl as measure_kl
    from .advice.memory_prediction import predict_memory as predict_memory
    from .advice.recommendation import recommend as recommend
    from .baselines import H2OCache as H2OCache
    from .batching import compressed_batching as compressed_batching
    from .custom_generate import generate_with as generate_with
    from .default_cache import compressed_by_default as compressed_by_default
    from .gear import GEARCache as GEARCache
    from .infinigen import InfiniGenCache as InfiniGenCache
    from .infinigen_transform import InfiniGenTransformCache as InfiniGenTransformCache
    from .kv_runahead import runahead_generate as runahead_generate
    from .kv_runahead import runahead_prefill as runahead_prefill
    from .prompt_store import PromptStore as PromptStore
    from .reports.memory import MemoryReport as MemoryReport
    from .reports.memory import measure_memory as measure_memory
    from .transform_coding import BlockCodec as BlockCodec
    from .transform_coding import TransformCodingCache as TransformCodingCache

    __version__: str


_LAZY = {
    "BlockCodec": "kvcache_plugins.transform_coding:BlockCodec",
    "GEARCache": "kvcache_plugins.gear:GEARCache",
    "H2OCache": "kvcache_plugins.baselines:H2OCache",
    "InfiniGenCache": "kvcache_plugins.infinigen:InfiniGenCache",
    "InfiniGenTransformCache": "kvcache_plugins.infinigen_transform:InfiniGenTransformCache",
    "MemoryReport": "kvcache_plugins.reports.memory:MemoryReport",
    "PromptStore": "kvcache_plugins.prompt_store:PromptStore",
    "TransformCodingCache": "kvcache_plugins.transform_coding:TransformCodingCache",
    "choose_cache": "kvcache_plugins.advice.choose_by_kl:choose_cache",
    "compressed_batching": "kvcache_plugins.batching:compressed_batching",
    "compressed_by_default": "kvcache_plugins.default_cache:compressed_by_default",
    "generate_with": "kvcache_plugins.custom_generate:generate_with",
    "measure_kl": "kvcache_plugins.advice.choose_by_kl:measure_kl",
    "measure_memory": "kvcache_plugins.reports.memory:measure_memory",
    "predict_memory": "kvcache_plugins.advice.memory_prediction:predict_memory",
    "recommend": "kvcache_plugins.advice.recommendation:recommend",
    "runahead_generate": "kvcache_plugins.kv_runahead:runahead_generate",
    "runahead_prefill": "kvcache_plugins.kv_runahead:runahead_prefill",
}
__all__ = ["create_cache", "list_caches", "register_cache", *_LAZY]
_get_lazily, _list_attributes = lazy_attributes(__name__, _LAZY)


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib import metadata

        return metadata.version("kvcache-plugins")
    if name == "InfiniGenGEARCache":
        raise ValueError("`InfiniGenGEARCache` has another name now: `InfiniGenTransformCache`")
    return _get_lazily(name)


def __dir__() -> list[str]:
    return sorted([*_list_attributes(), "__version__"])
