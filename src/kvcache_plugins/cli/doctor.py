"""`kvcache-plugins doctor`: what this machine has and lacks."""

from typing import Annotated

import typer

from kvcache_plugins.console.command_group import FAILED
from kvcache_plugins.console.json_output import JsonOption, print_json


def main(
    check: Annotated[
        bool, typer.Option("--check", help="Also run attention on every device; compiling may take minutes.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show versions, devices, kernels and models, and what is missing.

    Exit code 1 if the package cannot work here: something that it requires is missing, broken or of a version that is
    not supported, or a kernel that would be chosen does not run. What is optional and missing is only said.

    \b
    Examples:
        kvcache-plugins doctor
        kvcache-plugins doctor --check
        kvcache-plugins doctor --json | jq .findings
    """
    from kvcache_plugins.advice.doctor import examine
    from kvcache_plugins.console.doctor_tables import print_report

    report = examine(check)
    if as_json:
        print_json(report)
    else:
        print_report(report)
    if not report["works"]:
        raise typer.Exit(FAILED)
