"""Measures of a cache's answers: divergence, perplexity, retrieval, and texts side by side."""
