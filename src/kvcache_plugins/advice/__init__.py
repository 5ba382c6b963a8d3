"""Which cache to take, whether it fits, how near it stays on a prompt, and whether this machine can run it."""
