"""The code that a stage runs, and a digest of it that formatting and comments do not change.

The closure of a module is found without importing it: every import statement is followed, at the top of a file or
inside a function, as long as it leads into the same top-level packages.

A user's module (a reward of one's own) is followed into everything that it imports which is neither the standard
library's nor an installed distribution's: the helpers beside it, the packages of a source tree.

Limits: ``importlib.import_module`` is followed only for a literal name, and files that are not Python (presets,
templates) are not code: they enter a stage's key through its configuration or its ``external`` digest.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from functools import lru_cache
from importlib import metadata
from pathlib import Path

import rlcore
from rlcore.errors import StorageError
from rlcore.tasks.store.imports import NOTHING_CHOSEN, Chosen, imported_packages, imports_of, syntax_tree

OWN = "rlcore"  # the root of all our modules

# The folder says whether code can change a result. What lies in these moves bytes, records, schedules or draws, holds
# values that enter the key themselves (rlcore.config), or words (rlcore.metrics), or can stop a run and do nothing else
# (the audit and some canaries: no figure of theirs is in an artifact). Of a stage kind only its step and its parts
# compute.
NEUTRAL = (
    "rlcore.checks.audit",
    *(f"rlcore.checks.canaries.{name}" for name in ("known_answers", "masks", "rewards")),
    "rlcore.config",
    "rlcore.metrics",
    "rlcore.tasks.drawing",
    "rlcore.tasks.pipeline",
    "rlcore.tasks.presets",
    "rlcore.tasks.report",
    "rlcore.tasks.store",
    "rlcore.tasks.tracking",
)
_KIND = re.compile(r"rlcore\.tasks\.kinds(\.\w+)?")  # says where its parts are
_NOT_COMPUTED = re.compile(r"rlcore\.tasks\.kinds\.\w+\.(settings|page|stage|memory|checks)")
_MEASURES = ("psutil",)  # packages of others that look at the machine and change no result
_ROOT = Path(rlcore.__file__).resolve().parents[1]
_INSTALLED = frozenset({"site-packages", "dist-packages"})  # the folders of installed distributions


def closure(module: str, *, chosen: Chosen = NOTHING_CHOSEN, root: Path | None = None) -> frozenset[str]:
    """The modules of our packages that ``module`` imports, directly or not, and itself.

    ``chosen``: the rows of tables that are used (:mod:`rlcore.choices`). ``root`` is the folder that holds the package
    (default: that of this installation). A module outside our packages (a user's reward) is followed
    into all of the user's own code, by :func:`is_own`. Of a module that draws, the room of drawing counts.

    Raises:
        StorageError: the source of ``module`` cannot be found.
    """
    return frozenset(_reach(module, chosen, root))


def closure_digests(module: str, *, chosen: Chosen = NOTHING_CHOSEN, root: Path | None = None) -> Mapping[str, str]:
    """The digest of each module of the closure, by name."""
    found = sorted(_reach(module, chosen, root).items())
    return {name: _digest(path.read_text(encoding="utf-8")) for name, path in found}


def libraries(module: str, *, chosen: Chosen = NOTHING_CHOSEN) -> frozenset[str]:
    """The packages of others that the closure of ``module`` imports, at the top of a file or inside a function.

    What is imported for type checkers alone is not run.
    """
    reached = _reach(module, chosen, None)
    found = {name for path in reached.values() for name in imported_packages(path.read_text(encoding="utf-8"))}
    own = {name.partition(".")[0] for name in reached}
    return frozenset(name for name in found - own - {*_MEASURES} if not is_own(name))


def closure_digest(module: str, *, root: Path | None = None) -> str:
    """One SHA-256 over the names and digests of the whole closure."""
    pairs = "\n".join(f"{name} {digest}" for name, digest in closure_digests(module, root=root).items())
    return hashlib.sha256(pairs.encode()).hexdigest()


@lru_cache(maxsize=1)
def code_version() -> str:
    """The commit of this checkout (``+dirty`` with uncommitted changes), else what ``RLCORE_CODE_VERSION`` says of an
    image that was built from one, else the version of the package.
    """
    # An installation may lie inside somebody else's repository: only our own has this file tracked.
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
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _reach(module: str, chosen: Chosen, root: Path | None) -> dict[str, Path]:
    found: dict[str, Path] = {}
    top, draws = module.partition(".")[0], module.endswith(".page")
    own = (module, "rlcore.tasks.drawing") if draws else (module,)
    stops = [each for each in NEUTRAL if not any(_lies_in(name, (each,)) for name in own)]
    waiting = [module]
    while waiting:
        name = waiting.pop()
        is_neutral = _KIND.fullmatch(name) or (not draws and _NOT_COMPUTED.fullmatch(name)) or _lies_in(name, stops)
        path = None if name in found or is_neutral else _source(name, root)
        if path is None:
            continue
        source = path.read_text(encoding="utf-8")
        if name == module or _digest(source) != _digest(""):  # a package without code says nothing
            found[name] = path
        # A package's __init__ runs first. That of the library only says where names are, to those who ask it for one.
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
    """Return True if a top-level module is the user's own: neither Python's nor an installed distribution's."""
    if top in sys.stdlib_module_names or top == OWN:
        return False
    path = _foreign(top)
    return path is not None and not _INSTALLED & set(path.parts)


def _lies_in(module: str, packages: Collection[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _source(module: str, root: Path | None) -> Path | None:
    """The file of a module, or None when the name is not a module (``from x import a_function``)."""
    top, *rest = module.split(".")
    folder = (root or _ROOT) / top if top == OWN else _foreign(top)
    if folder is None:
        return None
    base = folder.joinpath(*rest)
    return next((path for path in (base / "__init__.py", base.with_suffix(".py")) if path.is_file()), None)


def _foreign(top: str) -> Path | None:
    """Return the path of a top-level module or package outside ours, without its suffix."""
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # __main__ of an interactive session
        return None
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(spec.origin).with_suffix("") if spec.has_location and spec.origin else None


@lru_cache(maxsize=1024)
def _digest(source: str) -> str:
    return hashlib.sha256(ast.dump(_WithoutDocstrings().visit(syntax_tree(source))).encode()).hexdigest()


class _WithoutDocstrings(ast.NodeTransformer):
    """Drops every statement that is a bare string; such a tree is for comparison, it need not compile."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_text else node
