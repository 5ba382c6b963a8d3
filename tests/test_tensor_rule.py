"""Every tensor that is made of numbers names its dtype and its device, read from the source with `ast`: PyTorch's
defaults are the user's, and tables that are kept would stay what they were at one time.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest


PROJECT_ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "triton_kernels", "eval")
# Integers by default, whatever the default dtype
INTEGERS = {"randint", "randperm", "tril_indices", "triu_indices"}
FACTORIES = INTEGERS | {
    *("arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace"),
    *("logspace", "normal", "ones", "rand", "randn", "range", "scalar_tensor", "tensor", "zeros"),
    *("bartlett_window", "blackman_window", "hamming_window", "hann_window", "kaiser_window"),
}


def find_unstated(source: str) -> Iterator[str]:
    """Lists calls that leave a dtype or a device to PyTorch's defaults, with their lines."""
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        called, named = ast.unparse(node.func), {each.arg for each in node.keywords}
        if called == "torch.where":
            missing = {"dtype"} if all(map(_is_number, node.args[1:])) else set()
        elif called.startswith("torch.") and node.func.attr in FACTORIES:
            missing = {"device"} if node.func.attr in INTEGERS else {"dtype", "device"}
        elif node.func.attr == "from_config":
            missing = {"dtype"}
        else:
            continue
        if missing - named:
            yield f"{node.lineno}: {ast.unparse(node)} without {' and '.join(sorted(missing - named))}"


def _is_number(node: ast.expr) -> bool:
    operand = node.operand if isinstance(node, ast.UnaryOp) else node
    # A constant by its name is a number too
    return isinstance(operand, ast.Constant) or isinstance(operand, ast.Name) and operand.id.isupper()


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_tensor_has_a_dtype_and_a_device(folder: str) -> None:
    paths = sorted((PROJECT_ROOT / folder).rglob("*.py"))
    found = [f"{path}:{line}" for path in paths for line in find_unstated(path.read_text(encoding="utf-8"))]
    assert paths and not found


@pytest.mark.parametrize(
    "source",
    [
        "torch.zeros(3, dtype=torch.float32)",
        "torch.empty(3, device=device)",
        "torch.arange(3)",
        "torch.tensor(numbers, **options)",
        "torch.randint(3, (4,))",
        "torch.where(mask, 1.0, -0.5)",
        "torch.where(mask, _LEAST, 0.0)",
        "AutoModelForCausalLM.from_config(config)",
    ],
)
def test_tensors_made_by_defaults_are_detected(source: str) -> None:
    assert list(find_unstated(source))


@pytest.mark.parametrize(
    "source",
    [
        'torch.zeros(3, dtype=torch.float32, device="cpu")',
        "torch.zeros_like(states)",
        "states.new_zeros(3)",
        "torch.randint(3, (4,), device=device)",
        "torch.where(mask, states, 0.0)",
        "tl.zeros((3,), tl.float32)",
    ],
)
def test_tensors_that_follow_others_are_accepted(source: str) -> None:
    assert not list(find_unstated(source))
