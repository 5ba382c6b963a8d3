"""Functions take turns, in as many rounds as there is time for."""

import torch

from kvcache_plugins.eval.harness.timing import time_in_turns


def test_functions_take_turns():
    calls = []
    functions = {name: lambda name=name: calls.append(name) for name in "ab"}
    measured = time_in_turns(functions, torch.device("cpu"), rounds=4, seconds=60)
    assert "".join(calls) == "ab" * 5
    assert [len(times) for times in measured.values()] == [4, 4]


def test_three_rounds_are_the_least():
    measured = time_in_turns({"a": lambda: None}, torch.device("cpu"), rounds=100, seconds=0)
    assert len(measured["a"]) == 3
