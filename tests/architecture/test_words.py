"""The rules of prose that can be counted; CONTRIBUTING has them all."""

from __future__ import annotations

import ast
import re

from tests.architecture.source_files import ROOT, modules, nodes
from tests.architecture.test_documents import DOCUMENTS

DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
QUESTION = re.compile(r"(What|Whether|Who|Whose|Whoever|How|Which|Where|When|Why|Does|Of)\b")
IDIOM = re.compile(r"\b(goes on|go on|goes back|looked at|held against|of one's own|as it is|says so|is worth)\b")


def test_a_docstring_begins_with_a_verb_or_a_noun_and_has_no_idiom() -> None:
    found = [
        (path, text.value)
        for path in modules()
        for node in nodes(path)
        if isinstance(node, ast.Expr) and isinstance(text := node.value, ast.Constant) and isinstance(text.value, str)
    ]  # of modules, classes, functions and constants
    assert [(path, text[:60]) for path, text in found if QUESTION.match(text) or IDIOM.search(text)] == []


def test_pages_have_no_idiom() -> None:
    lines = [line for path in DOCUMENTS for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line for line in lines if IDIOM.search(line)] == []


def test_docstrings_of_tests_begin_so_too() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").rglob("*.py"))}
    begun = re.compile(rf'"""\s*{QUESTION.pattern}')  # to parse all tests takes seconds
    trees = {path: ast.parse(text) for path, text in texts.items() if begun.search(text)}
    found = {
        f"{path.name}: {text.splitlines()[0]}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, DOCUMENTED) and QUESTION.match(text := ast.get_docstring(node) or "")
    }
    assert found == set()
