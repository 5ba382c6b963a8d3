"""
Contract of a cache: what `generate` and its users rely on, as checks for any cache.

```python
from kvcache_plugins.contract import render_grid, run_contract, tiny_models

model = tiny_models()["llama"]
results = run_contract(model, lambda: MyCache(model.config))
print(render_grid({"mine": results}))
```

`python -m kvcache_plugins.contract` runs every registered cache and prints the grid.
"""

from .cache_under_test import ContractCheck
from .runner import CONTRACT, CheckResult, render_grid, run_check, run_contract, tiny_models


__all__ = ["CONTRACT", "CheckResult", "ContractCheck", "render_grid", "run_check", "run_contract", "tiny_models"]
