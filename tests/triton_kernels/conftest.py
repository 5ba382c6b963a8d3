"""`kernel_cases`, which these tests share with those of the kernels for CPUs, is found by its name."""

import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
