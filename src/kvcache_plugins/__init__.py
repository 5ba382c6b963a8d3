"""KV caches for Hugging Face Transformers that hold less, move less and start sooner."""
