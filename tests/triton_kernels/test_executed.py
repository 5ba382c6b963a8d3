"""Compiled kernels executed without a GPU: other tests of kernels once more, on PTX that an emulator runs.

Races, accesses out of bounds, and reads of unwritten memory are reported. The emulator is no part of this
project: without it these tests are skipped.
"""

import os
import re
from pathlib import Path

import pytest


FOLDER = Path(__file__).parent
EMULATOR = Path(os.environ.get("KVCACHE_PLUGINS_PTX_RUN", FOLDER.parents[2] / "shared" / "tools" / "ptx_run"))
pytestmark = pytest.mark.skipif(not EMULATOR.is_dir(), reason=f"the emulator of PTX is not there: {EMULATOR}")
# Compute capability, files of tests, and which of them; a process takes longer to start than one of its tests
ATTENDED = "test_attention_equals_pytorch and (basis-unlike-dims or tables-smollm2)"
CODED = "test_rows_equal_pytorch and (smollm2-tables or odd-dims-basis)"
# Values of two bits are looked up where numbers are halves
LOOKED_UP = "test_attention_in_half_precision and tables-smollm2 and not bfloat16"
PUSHED = "pushes_equal_pytorch and k4v3"
DAILY = [
    (90, "test_attention.py test_rows.py", f"kivi-64 or {ATTENDED} or {LOOKED_UP} or {CODED}"),
    (90, "test_group_push.py", f"{PUSHED} and not preset"),
]
LONG = [
    *((capability, "test_group_push.py", "pushes_equal and not preset") for capability in (80, 90)),
    *((capability, "test_push.py", "padded or calibrated or most-bits") for capability in (80, 90)),
    (80, "test_attention.py", "test_matches_dense_attention and kivi-64"),
    *((capability, "test_rows.py", "test_attention_equals_pytorch") for capability in (80, 90)),
    *((capability, "test_rows.py", "test_rows_equal_pytorch and not many") for capability in (80, 90)),
    *((capability, "test_rows.py", "half_precision or scores") for capability in (80, 90)),
    *((capability, "test_rows.py", "masks or parts or splits or device or padding") for capability in (80, 90)),
    (86, "test_rows.py", "test_attention_equals_pytorch and (unlike-dims or widest)"),
    (120, "test_rows.py", "test_attention_equals_pytorch and (unlike-dims or widest)"),
    *((capability, "test_attention.py", "test_matches_dense_attention and not long") for capability in (80, 90)),
    *((capability, "test_gather.py", "test") for capability in (80, 90)),
    *(
        (capability, "test_infinigen.py", "(gqa and not everything) or scores or token or norm")
        for capability in (80, 90)
    ),
    *((capability, "test_infinigen.py", "rotation or decoded") for capability in (80, 90)),
    *((capability, "test_static_steps.py", "attention_equals or rows_equal") for capability in (80, 90)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "files", "which"), [*DAILY, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)]
)
def test_compiled_kernels_are_right(capability, files, which, run_python):
    variables = {"EMULATOR_TARGET": capability, "OMP_NUM_THREADS": 1, "TRITON_DEFAULT_FP_FUSION": 1}
    command = ["-m", "pytest", "-p", "executing", "-p", "no:cacheprovider", "-q", "-W", "ignore"]
    command += ["--numprocesses", 0, "-m", "not cuda", *files.split(), "-k", which]
    output = run_python(*command, cwd=FOLDER, PYTHONPATH=f"{EMULATOR}{os.pathsep}{FOLDER}", **variables).stdout
    assert f"target sm_{capability}" in output
    _, _, reports = output.partition("reports:\n")
    # Rows are read in aligned words, and the last one may end behind its storage, within what is allocated. Kernels
    # may need more than Turing has: no smaller machine than sm_80 is executed here
    known = (
        "word at the end",
        "SHARED MEMORY of sm_75",
        # A head's last program reads what the others stored before they counted themselves by an atomic addition with
        # release and acquire, an order between programs that the emulator does not know
        "GLOBAL READ-WRITE: transform_coding.step_kernel.step_kernel at partials.py",
    )
    lines = [line for line in reports.splitlines() if line.startswith("  ")]
    unknown = [line for line in lines if not any(each in line for each in known)]
    assert ("no reports" in output or reports) and not unknown, output[-4000:]
    launches = sum(int(count) for count in re.findall(r": (\d+) launches", output))
    assert launches > 0, output
