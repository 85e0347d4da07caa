"""Digest of the code that a stage runs, independent of formatting and comments; and the installed packages.

The closure of a module is found without importing it: each import statement, at the top of a file or inside a function,
is followed within the same top-level packages. A custom module, such as a reward, is followed into all of its imports
outside the standard library and installed distributions: neighboring helpers and packages of a source tree.

Limits: ``importlib.import_module`` is followed only for a literal name. Files that are not Python (presets, templates)
are not code: they enter a stage's key through its configuration or its ``source_digest``.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache, lru_cache
from importlib import metadata
from pathlib import Path

import rlcore
from rlcore.errors import StorageError
from rlcore.tasks.store.remembered import remembered

Chosen = Mapping[str, frozenset[str]]
"""The rows that are chosen of each table of :func:`rlcore.choices.choices`, by its setting; else every row counts."""
NOTHING_CHOSEN: Chosen = {}
_Rows = list[tuple[str, str, list[str]]]
_ATTEMPTS, _MOMENT = 20, 0.05  # attempts at a syntax tree, and seconds between them
OWN = "rlcore"  # the root of all rlcore modules

# The folder tells whether code can change a result. These move bytes, records, schedules or drawings, hold values that
# are in the key themselves (rlcore.config) or texts (rlcore.extras, metrics, causes), or can only stop a run (checks of
# settings, the audit, some canaries: of their metrics only label noise and the shuffle gap are in an artifact, which
# nothing is trained by). Of a stage kind only its step and its components compute.
NEUTRAL = (
    "rlcore.checks.audit",
    "rlcore.checks.causes",
    "rlcore.checks.settings",
    *(f"rlcore.checks.canaries.{name}" for name in ("known_answers", "masks", "rewards")),
    "rlcore.config",
    "rlcore.extras",
    "rlcore.metrics",
    "rlcore.models.integrity",
    "rlcore.progress",
    "rlcore.tasks.drawing",
    "rlcore.tasks.keys",
    "rlcore.tasks.preflight",
    "rlcore.tasks.promotion",
    "rlcore.tasks.run",
    "rlcore.tasks.presets",
    "rlcore.tasks.report",
    "rlcore.tasks.store",
    "rlcore.tasks.tracking",
    "rlcore.training.audit",
)
_KIND = re.compile(r"rlcore\.tasks\.kinds(\.\w+)?")  # says where its parts are
_NOT_COMPUTED = re.compile(r"rlcore\.tasks\.(kinds\.\w+|promotion)\.(kind|page)")
_MEASURES = ("psutil", "pydantic")  # external packages that inspect the machine or check types, and change no result
_ROOT = Path(rlcore.__file__).resolve().parents[1]
_INSTALLED = frozenset({"site-packages", "dist-packages"})  # folders of installed distributions


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


@remembered
def _packages(source: str) -> list[str]:
    """Return the top-level names that a file imports, without Python's own and names for type checkers alone."""
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
        alone = type(statement)(**{**vars(statement), "names": [alias]})
        found[alias.asname or alias.name.partition(".")[0]] = frozenset(_targets(alone, package))
    return found


def _reached(
    nodes: Iterable[ast.AST], package: str, named: Mapping[str, frozenset[str]], helpers: Mapping[str, ast.stmt]
) -> frozenset[str]:
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
    def visit_If(self, node: ast.If) -> ast.AST:
        is_for_types = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        kept = ast.If(test=node.test, body=[ast.Pass()], orelse=node.orelse) if is_for_types else node
        return self.generic_visit(kept)


def closure_digests(module: str, *, chosen: Chosen = NOTHING_CHOSEN, root: Path | None = None) -> Mapping[str, str]:
    """Return the rlcore modules that ``module`` imports, directly or indirectly, and itself, with their digests.

    ``root``: the folder of the package (default: this installation). For a module that draws, ``drawing`` counts.
    Raises:
        StorageError: the source of ``module`` cannot be found.
    """
    found = sorted(_reach(module, chosen, root).items())
    return {name: _digest(_text(path)) for name, path in found}


def source_digests(module: str) -> list[tuple[str, str]]:
    """Return the file and the digest of each module of a custom module's closure: ``my_rewards.py``."""
    found = sorted(_reach(module, NOTHING_CHOSEN, None).items())
    ends = {name: "/__init__.py" if path.name == "__init__.py" else ".py" for name, path in found}
    return [(name.replace(".", "/") + ends[name], _digest(_text(path))) for name, path in found]


def libraries(module: str, *, chosen: Chosen = NOTHING_CHOSEN) -> frozenset[str]:
    """Return the external packages that the closure of ``module`` imports, at the top of a file or in a function.

    Those for type checkers do not count.
    """
    reached = _reach(module, chosen, None)
    found = {name for path in reached.values() for name in _packages(_text(path))}
    own = {name.partition(".")[0] for name in reached}
    return frozenset(name for name in found - own - {*_MEASURES} if not is_own(name))


def closure_digest(module: str, *, root: Path | None = None) -> str:
    """Return one SHA-256 over the names and digests of the whole closure."""
    pairs = "\n".join(f"{name} {digest}" for name, digest in closure_digests(module, root=root).items())
    return hashlib.sha256(pairs.encode()).hexdigest()


@cache
def package_digest() -> str:
    """Return one SHA-256 over all source files of rlcore, for facts that any of them may decide on."""
    digest = hashlib.sha256()
    for folder, folders, names in os.walk(_ROOT / OWN, followlinks=True):
        folders[:] = sorted(each for each in folders if each != "__pycache__")
        for name in sorted(each for each in names if each.endswith(".py")):
            digest.update(f"{name}\0".encode() + Path(folder, name).read_bytes() + b"\0")
    return digest.hexdigest()


@lru_cache(maxsize=1)
def code_version() -> str:
    """Return the commit of this checkout (``+dirty`` with changes), else ``RLCORE_CODE_VERSION``, else the version."""
    # An installation may be inside another repository: only rlcore's own tracks this file.
    if _git("ls-files", "--error-unmatch", str(Path(__file__).resolve())):
        commit = _git("rev-parse", "HEAD")
        return f"{commit}+dirty" if _git("status", "--porcelain", "--untracked-files=no") else commit
    if os.environ.get("RLCORE_CODE_VERSION"):
        return os.environ["RLCORE_CODE_VERSION"]
    try:
        return f"rlcore {metadata.version('rlcore')}"
    except metadata.PackageNotFoundError:  # run from a copy of the sources
        return "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(_ROOT), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _reach(module: str, chosen: Chosen, root: Path | None) -> dict[str, Path]:
    found: dict[str, Path] = {}
    top, draws = module.partition(".")[0], module.endswith((".page", ".plots", ".kind"))
    own = (module, "rlcore.tasks.drawing") if draws else (module,)
    stops = [each for each in NEUTRAL if not any(_lies_in(name, (each,)) for name in own)]
    waiting, seen = [module], set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        is_neutral = _KIND.fullmatch(name) or (not draws and _NOT_COMPUTED.fullmatch(name)) or _lies_in(name, stops)
        path = None if is_neutral else _source(name, root)
        if path is None:
            continue
        try:
            source = _text(path)
            has_code = _digest(source) != _digest("")
        except (SyntaxError, ValueError) as error:  # of a custom module
            raise StorageError(f"this is no Python: {error}", where=str(path), fix="correct the file") from error
        if name == module or has_code:  # a package without code is ignored
            found[name] = path
        # A package's __init__ runs first. The library's only maps names, for importers of the package itself.
        parents = [parent] if (parent := name.rpartition(".")[0]) not in ("", OWN) else []
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        imported = imports_of(source, package, chosen)
        is_users = name.partition(".")[0] != OWN
        tops = {target: target.partition(".")[0] for target in (*parents, *imported)}
        waiting += [t for t, own in tops.items() if own in (OWN, top) or (is_users and is_own(own))]
    if module not in found:
        raise StorageError(
            f"the source of {module!r} cannot be found, so its results cannot be cached",
            fix="define the stage's function in a module that can be imported",
        )
    return found


def is_own(top: str) -> bool:
    """Return True if a top-level module is custom: neither Python's nor an installed distribution's."""
    if top in sys.stdlib_module_names or top == OWN:
        return False
    path = _foreign(top)
    return path is not None and not _INSTALLED & set(path.parts)


def _lies_in(module: str, packages: Collection[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _source(module: str, root: Path | None) -> Path | None:
    """Return the file of a module, or None if the name is not a module (``from x import a_function``)."""
    top, *rest = module.split(".")
    folder = (root or _ROOT) / top if top == OWN else _foreign(top)
    if folder is None:
        return None
    base = "/".join((str(folder), *rest))
    found = (path for path in (f"{base}/__init__.py", f"{base}.py") if os.path.isfile(path))  # noqa: PTH113 - of thousands
    return next(map(Path, found), None)


def _foreign(top: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # __main__ of an interactive session
        return None
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(spec.origin).with_suffix("") if spec.has_location and spec.origin else None


def _text(path: Path) -> str:
    """Return the source of a module as Python reads it: a byte order mark or a line names its encoding."""
    return importlib.util.decode_source(path.read_bytes())


@remembered
def _digest(source: str) -> str:
    return hashlib.sha256(ast.dump(_WithoutDocstrings().visit(syntax_tree(source))).encode()).hexdigest()


class _WithoutDocstrings(ast.NodeTransformer):
    """Transformer that drops all bare strings."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_text else node


@cache
def pins() -> str:
    """Return a line ``name==version`` for each installed package, sorted, after one for the interpreter."""
    found = {f"{each.name.lower()}=={each.version}" for each in metadata.distributions() if each.name}
    return "\n".join([f"python=={platform.python_version()}", *sorted(found)]) + "\n"


def installations() -> str:
    """Return the folders of installed packages with their times, which each installation or removal changes."""
    folders = [Path(each) for each in dict.fromkeys(sys.path) if Path(each).name in ("site-packages", "dist-packages")]
    return "\n".join(f"{folder} {folder.stat().st_mtime_ns}" for folder in folders if folder.is_dir())


def pins_digest() -> str:
    """Return the SHA-256 of :func:`pins`."""
    return hashlib.sha256(pins().encode()).hexdigest()
