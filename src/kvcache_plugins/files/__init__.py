"""Files that this package writes and reads again: written whole or not at all, and nothing in them believed unchecked.

A floor below everything else, as it knows of no cache: what the numbers in a file mean is for those to check whose
file it is (`packed.snapshot`, `infinigen.calibration`, `kv_runahead.planner`).
"""
