"""
The cache contract: what `generate` and its users rely on from any cache, as checks that can be pointed at any cache.

```python
from kvcache_plugins.contract import render_grid, run_contract, tiny_models

model = tiny_models()["llama"]
results = run_contract(model, lambda: MyCache(model.config))
print(render_grid({"mine": results}))
```

`python -m kvcache_plugins.contract` runs every registered cache and prints the grid.
"""

from .runner import CONTRACT, CheckResult, render_grid, run_check, run_contract, tiny_models
from .subject import ContractCheck


__all__ = ["CONTRACT", "CheckResult", "ContractCheck", "render_grid", "run_check", "run_contract", "tiny_models"]
