"""What the commands of `kvcache-plugins` share: options, tables, JSON, progress and exit codes."""
