"""Options, tables, JSON, progress and exit codes that the commands of `kvcache-plugins` share."""
