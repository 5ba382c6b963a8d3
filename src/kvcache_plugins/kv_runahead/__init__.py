"""KV-Runahead: several processes fill one cache, and the first token comes sooner."""
