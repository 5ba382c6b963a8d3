"""The processes of these tests import `rank_programs`, so it has to be found by its name."""

import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent))
