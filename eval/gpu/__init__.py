"""All that only a GPU can tell, checked and then timed in one run: `kvcache-plugins bench gpu`."""
