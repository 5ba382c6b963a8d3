"""What `kvcache-plugins eval run --help` says of lm-eval's options, against lm-eval's own parser."""

import re
import subprocess
import sys

from kvcache_plugins.cli.evaluate import LM_EVAL_COMMANDS


def test_options_that_help_names_are_those_of_lm_eval() -> None:
    command = [sys.executable, "-m", "lm_eval", "run", "--help"]
    theirs = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    ours = re.findall(r"^    (--\w+)", LM_EVAL_COMMANDS["run"], re.MULTILINE)
    assert len(ours) == 10
    assert [option for option in ours if not re.search(rf"{option}\b", theirs)] == []
