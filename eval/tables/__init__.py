"""Results as Markdown tables and figures: what `kvcache-plugins eval report` writes into the documents."""
