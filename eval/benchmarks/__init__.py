"""What is timed or weighed, a module for each command of `kvcache-plugins bench`."""
