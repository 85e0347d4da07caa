"""A function fits a screen, and a file has one subject: neither grows beyond what can be read at once."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from tests.architecture.source_files import ROOT, modules, nodes

PACKAGES = ("rlcore/", "tasks/", "flows/", "data_contracts/", "examples/")
MOST_LINES_OF_A_FUNCTION, MOST_LINES_OF_A_FILE = 50, 500


def long_functions(code: Iterable[ast.AST]) -> Iterator[str]:
    """The functions of a module that are too long, with their lines."""
    for node in code:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
            count = node.end_lineno - node.lineno + 1
            if count > MOST_LINES_OF_A_FUNCTION:
                yield f"{node.name}: {count} lines"


def test_functions_and_files_can_be_read_at_once() -> None:
    paths = [path for path in modules() if path.startswith(PACKAGES)]
    assert [(path, function) for path in paths for function in long_functions(nodes(path))] == []
    lines = {path: len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in paths}
    assert {path: count for path, count in lines.items() if count > MOST_LINES_OF_A_FILE} == {}


def test_the_walk_finds_a_long_function_wherever_it_stands() -> None:
    body = "\n".join(["        x = 1"] * MOST_LINES_OF_A_FUNCTION)
    assert list(long_functions(ast.walk(ast.parse(f"class A:\n    def f(self):\n{body}")))) == ["f: 51 lines"]
    assert list(long_functions(ast.walk(ast.parse("def f():\n    return 1")))) == []
