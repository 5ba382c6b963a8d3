"""What a cache holds, in bytes and counters, and how a notebook shows it."""
