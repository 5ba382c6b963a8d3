"""Puts `cache_operations`, which the tests of this folder share, on the path."""

import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent))
