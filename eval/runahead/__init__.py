"""KV-Runahead measured beside tensor/sequence parallelism, planned from timings, and simulated for more ranks."""
