"""Imports of a source file, from its syntax tree: the code is not run."""

from __future__ import annotations

import ast
import sys
import time
from collections.abc import Iterable, Iterator, Mapping

from rlcore.tasks.store.remembered import remembered

Chosen = Mapping[str, frozenset[str]]
"""The rows that are chosen of each table of :func:`rlcore.choices.choices`, by its setting; else every row counts."""
NOTHING_CHOSEN: Chosen = {}
_Rows = list[tuple[str, str, list[str]]]
_ATTEMPTS, _MOMENT = 20, 0.05  # attempts at a syntax tree, and seconds between them


def imports_of(source: str, package: str, chosen: Chosen = NOTHING_CHOSEN) -> frozenset[str]:
    """Return the names that a module of ``package`` imports, at its top or in a function, modules and what is in them.

    Of a table of choices only the chosen rows count, with the private functions that they use.
    """
    always, rows = _read(source, package)
    of_rows = (found for setting, row, found in rows if row in chosen.get(setting, (row,)))
    return frozenset(always).union(*of_rows)


def syntax_tree(source: str) -> ast.Module:
    """Return the syntax tree of a file. Concurrent parsing in two threads fails in CPython (gh-106905)."""
    for _ in range(_ATTEMPTS):
        try:
            return ast.parse(source)
        except SystemError:
            time.sleep(_MOMENT)
    return ast.parse(source)


def imported_packages(source: str) -> frozenset[str]:
    """Return the top-level names that a file imports, without Python's own and names for type checkers alone."""
    return frozenset(_packages(source))


@remembered
def _packages(source: str) -> list[str]:
    tree = _WithoutTypeChecking().visit(syntax_tree(source))
    relative = (node for node in ast.walk(tree) if not (isinstance(node, ast.ImportFrom) and node.level))
    tops = {target.partition(".")[0] for node in relative for target in _targets(node, "")}
    return sorted(tops - sys.stdlib_module_names - {""})


# Remembered by the text and not by modification time, which is too coarse for two edits in one tick.
@remembered
def _read(source: str, package: str) -> tuple[list[str], _Rows]:
    """Return the unconditional imports of a module, and for each table row the setting, the row and its imports."""
    tree: ast.Module = _WithoutTypeChecking().visit(syntax_tree(source))
    tables = {statement: table for statement in tree.body if (table := _table(statement))}
    if not tables:
        return sorted({target for node in ast.walk(tree) for target in _targets(node, package)}), []
    named, helpers = dict[str, frozenset[str]](), dict[str, ast.stmt]()
    roots: list[ast.AST] = []
    for statement in tree.body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            named |= _names(statement, package)
        elif isinstance(statement, ast.FunctionDef | ast.ClassDef) and statement.name.startswith("_"):
            helpers[statement.name] = statement
        elif statement not in tables:
            roots.append(statement)
    rows = [
        (setting, row, sorted(_reached([value], package, named, helpers)))
        for setting, values in tables.values()
        for row, value in values.items()
    ]
    return sorted(_reached(roots, package, named, helpers)), rows


def _table(statement: ast.stmt) -> tuple[str, Mapping[str, ast.expr]] | None:
    """Parse ``NAME = choices("setting", {"row": ...})`` into the setting and the rows; None for other statements."""
    call = getattr(statement, "value", None)
    if not (isinstance(call, ast.Call) and _called_name(call) == "choices" and len(call.args) == 2):
        return None
    setting, rows = call.args
    if not (isinstance(setting, ast.Constant) and isinstance(setting.value, str) and isinstance(rows, ast.Dict)):
        return None
    pairs = zip(rows.keys, rows.values, strict=True)
    return setting.value, {ast.literal_eval(key): value for key, value in pairs if key}


def _names(statement: ast.Import | ast.ImportFrom, package: str) -> dict[str, frozenset[str]]:
    found = {}
    for alias in statement.names:
        alone = ast.Import([alias]) if isinstance(statement, ast.Import) else _from(statement, alias)
        found[alias.asname or alias.name.partition(".")[0]] = frozenset(_targets(alone, package))
    return found


def _from(statement: ast.ImportFrom, alias: ast.alias) -> ast.ImportFrom:
    return ast.ImportFrom(statement.module, [alias], statement.level)


def _reached(
    nodes: Iterable[ast.AST], package: str, named: Mapping[str, frozenset[str]], helpers: Mapping[str, ast.stmt]
) -> frozenset[str]:
    """Return the imports of nodes, with the private functions and classes of the module that they name."""
    waiting, seen, found = list(nodes), set[str](), set[str]()
    while waiting:
        for node in ast.walk(waiting.pop()):
            found |= set(_targets(node, package))
            if isinstance(node, ast.Name) and node.id not in seen:
                seen.add(node.id)
                found |= named.get(node.id, frozenset())
                waiting += [helpers[node.id]] if node.id in helpers else []
    return frozenset(found)


def _targets(node: ast.AST, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        parent = package.rsplit(".", node.level - 1)[0] if node.level else ""
        base = ".".join(part for part in (parent, node.module) if part)
        yield base
        yield from (f"{base}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and _called_name(node) == "import_module" and node.args:
        argument = node.args[0]
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            yield argument.value


def _called_name(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


class _WithoutTypeChecking(ast.NodeTransformer):
    """Transformer that drops the blocks of ``if TYPE_CHECKING``."""

    def visit_If(self, node: ast.If) -> ast.AST:
        is_for_types = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        kept = ast.If(test=node.test, body=[ast.Pass()], orelse=node.orelse) if is_for_types else node
        return self.generic_visit(kept)
