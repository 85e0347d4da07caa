"""Public tensor functions of rlcore say what the axes are, and tests execute what they say."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Bool, Float

from tests import shapes
from tests.architecture.source_files import modules

# What has no axes: functions that are values, which no annotation of theirs could execute, and states by name.
WITHOUT_AXES = ("Callable[", "Mapping[str, Tensor]", "Mapping[str, torch.Tensor]", "Mapping[str, Tensors]")


def checked_modules() -> dict[str, ast.Module]:
    """The modules that the hook covers but for the audit's loops over floats, by the name they are imported under."""
    named = {path.removesuffix(".py").replace("/", "."): tree for path, tree in modules().items()}
    return {name: tree for name, tree in named.items() if name.startswith(shapes.ROOMS) and ".audit." not in name}


def public(tree: ast.Module | ast.ClassDef) -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and shapes.is_public(node):
            yield node.name, node
            if isinstance(node, ast.ClassDef):
                yield from ((f"{node.name}.{name}", each) for name, each in public(node))


def annotations(node: ast.FunctionDef | ast.ClassDef) -> dict[str, str]:
    if isinstance(node, ast.ClassDef):
        return {ast.unparse(each.target): ast.unparse(each.annotation) for each in shapes.fields_of(node)}
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    found = {each.arg: ast.unparse(each.annotation) for each in arguments if each.annotation}
    return found | ({"return": ast.unparse(node.returns)} if node.returns else {})


@pytest.fixture(scope="module")
def definitions() -> dict[tuple[str, str], dict[str, str]]:
    return {
        (module, name): annotations(node) for module, tree in checked_modules().items() for name, node in public(tree)
    }


def test_every_public_tensor_says_its_axes(definitions: dict[tuple[str, str], dict[str, str]]) -> None:
    bare = [
        (*place, name)
        for place, hints in definitions.items()
        for name, hint in hints.items()
        if "Tensor" in hint and not shapes.has_axes(hint) and not any(known in hint for known in WITHOUT_AXES)
    ]
    assert bare == []


def test_the_hook_knows_every_name_that_is_imported_for_axes() -> None:
    trees = checked_modules().values()
    lines = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = {alias.name for node in lines if node.module == "jaxtyping" for alias in node.names}
    assert names == set(shapes.DTYPES)


def wrong(hint: str) -> torch.Tensor:
    """A tensor of seven axes, which nothing has, in the dtype of the annotation; complex where any axes are welcome."""
    dtypes = {"Bool[": torch.bool, "Float[": torch.float32, "Float64[": torch.float64, "Int[": torch.int64}
    named = next((dtype for name, dtype in dtypes.items() if name in hint), torch.float32)
    return torch.zeros([1] * 7, dtype=torch.complex64 if "..." in hint or "*" in hint else named)


def refuses(module: str, name: str, hints: dict[str, str]) -> bool:
    called: Any = importlib.import_module(module)
    for part in name.split("."):
        called = getattr(called, part)
    arguments = {each: wrong(hint) if shapes.has_axes(hint) else None for each, hint in hints.items()}
    itself = [None] if name.count(".") else []  # methods are called on the class
    try:
        called(*itself, **arguments)
    except BeartypeCallHintViolation:
        return True
    except Exception:  # noqa: BLE001 - it went past the check
        return False
    return False


def test_a_tensor_of_another_shape_is_refused(definitions: dict[tuple[str, str], dict[str, str]]) -> None:
    inputs = {place: {name: hints[name] for name in hints if name != "return"} for place, hints in definitions.items()}
    given = {place: hints for place, hints in inputs.items() if any(map(shapes.has_axes, hints.values()))}
    assert len(given) > 50
    assert [place for place, hints in given.items() if not refuses(*place, hints)] == []


def total(values: Float[torch.Tensor, "tokens"], mask: Bool[torch.Tensor, "tokens"]) -> Float[torch.Tensor, ""]:
    """Wrong where the mask is all True: one number is promised, and all of them come."""
    return values if bool(mask.all()) else values.sum()


def test_axes_of_one_name_have_one_length_and_results_are_checked_too() -> None:
    checked = shapes.checked_function(total)
    assert float(checked(torch.ones(3), torch.zeros(3, dtype=torch.bool))) == 3.0
    with pytest.raises(BeartypeCallHintViolation, match="tokens is 4"):
        checked(torch.ones(3), torch.zeros(4, dtype=torch.bool))
    with pytest.raises(BeartypeCallHintViolation, match="return"):
        checked(torch.ones(3), torch.ones(3, dtype=torch.bool))


def test_the_first_calls_of_a_test_are_checked_and_later_ones_cost_nothing() -> None:
    checked = shapes.checked_function(total)
    for _ in range(shapes.CALLS):
        checked(torch.ones(2), torch.zeros(2, dtype=torch.bool))
    checked(torch.ones(2, 2), torch.zeros(2, dtype=torch.bool))
    shapes.begin_test()
    with pytest.raises(BeartypeCallHintViolation):
        checked(torch.ones(2, 2), torch.zeros(2, dtype=torch.bool))
