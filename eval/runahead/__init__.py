"""KV-Runahead measured beside tensor/sequence parallelism, and planned from timings."""
