"""KV caches for Hugging Face Transformers that hold less, move less and start sooner.

```python
>>> from kvcache_plugins import GEARCache, create_cache
>>> model.generate(**inputs, past_key_values=GEARCache(model.config, nbits=2))
>>> model.generate(**inputs, past_key_values=create_cache("gear-2bit", model))
```
"""

from . import transformers_caches  # noqa: F401 - registers them
from .baselines import H2OCache
from .gear import GEARCache
from .guard import choose_cache
from .infinigen import InfiniGenCache
from .infinigen_gear import InfiniGenGEARCache
from .kv_runahead import runahead_generate, runahead_prefill
from .memory import MemoryReport, measure_memory
from .recommendation import recommend
from .registry import create_cache, list_caches, register_cache
from .sizing import predict_memory


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
