"""The project's own source files, parsed: what the architecture tests walk over."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("rlcore", "tasks", "flows", "data_contracts", "examples", "benchmarks")


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of our packages, by its path below the root."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


@cache
def nodes(path: str) -> tuple[ast.AST, ...]:
    """All of a module's syntax tree: to walk over every module takes a second."""
    return tuple(ast.walk(modules()[path]))


def imported(code: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """The modules that a piece of code imports, with the line."""
    for node in code:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module, node.lineno


def imported_at_module_level(tree: ast.Module) -> set[str]:
    """The top-level names of what runs on import; what stands under ``if TYPE_CHECKING`` or in a function does not."""
    run = [node for top in tree.body for node in (top.body if isinstance(top, ast.Try) else [top])]
    direct = [node for node in run if isinstance(node, ast.Import | ast.ImportFrom)]
    return {name.partition(".")[0] for node in direct for name, _ in imported([node])}
