"""What the tests of this folder share is found by its name: `cache_operations`."""

import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent))
