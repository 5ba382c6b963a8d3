"""What the tests of this folder share is found by its name: `toy_caches`."""

import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent))
