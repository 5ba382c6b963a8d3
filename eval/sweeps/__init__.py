"""Caches x models x measures, from a YAML file; a run that was interrupted goes on where it was."""
