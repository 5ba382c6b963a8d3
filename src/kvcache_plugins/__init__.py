"""KV caches for Hugging Face Transformers that hold less, move less and start sooner.

```python
>>> from kvcache_plugins import GEARCache, create_cache
>>> model.generate(**inputs, past_key_values=GEARCache(model.config, nbits=2))
>>> model.generate(**inputs, past_key_values=create_cache("gear-2bit", model))
```
"""

from .advice.choose_by_kl import choose_cache
from .advice.memory_prediction import predict_memory
from .advice.recommendation import recommend
from .baselines import (
    H2OCache,
    transformers_caches,  # noqa: F401 - registers them
)
from .gear import GEARCache
from .infinigen import InfiniGenCache
from .infinigen_gear import InfiniGenGEARCache
from .kv_runahead import runahead_generate, runahead_prefill
from .registry import create_cache, list_caches, register_cache
from .reports.memory import MemoryReport, measure_memory


__all__ = [
    "GEARCache",
    "H2OCache",
    "InfiniGenCache",
    "InfiniGenGEARCache",
    "MemoryReport",
    "choose_cache",
    "create_cache",
    "list_caches",
    "measure_memory",
    "predict_memory",
    "recommend",
    "register_cache",
    "runahead_generate",
    "runahead_prefill",
]
