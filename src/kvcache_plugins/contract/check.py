"""Items of the contract: a check declares itself one, with what has to hold."""

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedModel

from .subject import CacheMaker, Subject, Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class ContractCheck:
    """
    Item of the contract.

    Args:
        name (`str`): The row of the grid and the id in tests.
        summary (`str`): What has to hold.
        function (`Callable`): Takes a `Subject` and raises if it does not hold.
        on_hybrid (`bool`): Whether it is about models with sliding-window layers, and runs on one of those.
    """

    name: str
    summary: str
    function: Callable[[Subject], None]
    on_hybrid: bool = False

    def run(
        self, model: PreTrainedModel, tokenizer: Tokenizer, make_cache: CacheMaker, make_reference: CacheMaker
    ) -> None:
        """Raises whatever the check or the cache raises. `run_check` makes a `CheckResult` of it."""
        subject = Subject(model=model, tokenizer=tokenizer, make_cache=make_cache, make_reference=make_reference)
        self.function(subject)


CHECKS: list[ContractCheck] = []
Check = Callable[[Subject], None]


def contract_check(summary: str, *, on_hybrid: bool = False) -> Callable[[Check], Check]:
    """Adds `check_some_name` to the contract as the item `some-name`. Arguments: see `ContractCheck`."""

    def add(function: Check) -> Check:
        name = function.__name__.removeprefix("check_").replace("_", "-")
        CHECKS.append(ContractCheck(name=name, summary=summary, function=function, on_hybrid=on_hybrid))
        return function

    return add
