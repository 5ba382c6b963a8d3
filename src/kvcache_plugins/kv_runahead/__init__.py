"""
KV-Runahead: several processes fill one cache, and the first token comes sooner.

Implements [KV-Runahead: Scalable Causal LLM Inference by Parallel Key-Value Cache
Generation](https://huggingface.co/papers/2405.05329).
"""

from .planner import PartitionTable
from .prefill import RunaheadOutput, runahead_generate, runahead_prefill
from .transport import RunaheadError


__all__ = ["PartitionTable", "RunaheadError", "RunaheadOutput", "runahead_generate", "runahead_prefill"]
