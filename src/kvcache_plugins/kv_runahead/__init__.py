"""
KV-Runahead: several processes fill one cache, and the first token comes sooner.

Implements [KV-Runahead: Scalable Causal LLM Inference by Parallel Key-Value Cache
Generation](https://huggingface.co/papers/2405.05329).
"""

from .failure_reports import RunaheadError
from .output import RunaheadOutput
from .prefill import runahead_generate, runahead_prefill
from .table import PartitionTable


__all__ = ["PartitionTable", "RunaheadError", "RunaheadOutput", "runahead_generate", "runahead_prefill"]
