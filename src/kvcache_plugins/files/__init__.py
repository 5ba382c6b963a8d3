"""Files of this package: written completely or not at all, and checked field by field when they are read.

This room knows no cache. The meaning of the numbers in a file is checked by the owner of the file
(`packed.snapshot`, `infinigen.calibration`, `kv_runahead.planner`).
"""
