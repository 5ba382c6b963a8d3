"""Reports of a cache's bytes and counters, also for notebooks."""
