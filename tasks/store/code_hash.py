"""Digest of the code that a stage runs, independent of formatting and comments.

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
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from functools import cache, lru_cache
from importlib import metadata
from pathlib import Path

import rlcore
from rlcore.errors import StorageError
from rlcore.tasks.store.imports import NOTHING_CHOSEN, Chosen, imported_packages, imports_of, syntax_tree
from rlcore.tasks.store.remembered import remembered

OWN = "rlcore"  # the root of all rlcore modules

# The folder tells whether code can change a result. These move bytes, records, schedules or drawings, hold values that
# are in the key themselves (rlcore.config) or texts (rlcore.extras, metrics, causes), or can only stop a run (checks of
# settings, the audit, some canaries: none of their metrics is in an artifact). Of a stage kind only its step and
# components compute.
NEUTRAL = (
    "rlcore.checks.audit",
    "rlcore.checks.causes",
    "rlcore.checks.settings",
    *(f"rlcore.checks.canaries.{name}" for name in ("known_answers", "masks", "rewards")),
    "rlcore.config",
    "rlcore.extras",
    "rlcore.metrics",
    "rlcore.models.integrity",
    "rlcore.models.seal",
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
_NOT_COMPUTED = re.compile(r"rlcore\.tasks\.kinds\.\w+\.(settings|page|stage|memory|checks)")
_MEASURES = ("psutil",)  # external packages that inspect the machine and change no result
_ROOT = Path(rlcore.__file__).resolve().parents[1]
_INSTALLED = frozenset({"site-packages", "dist-packages"})  # folders of installed distributions


def closure(module: str, *, chosen: Chosen = NOTHING_CHOSEN, root: Path | None = None) -> frozenset[str]:
    """Return the rlcore modules that ``module`` imports, directly or indirectly, and itself.

    ``chosen``: the rows of tables that are used (:mod:`rlcore.choices`). ``root``: the folder of the package (default:
    this installation). A custom module is followed into all custom code (:func:`is_own`). For a module that draws, the
    package ``drawing`` counts.
    Raises:
        StorageError: the source of ``module`` cannot be found.
    """
    return frozenset(_reach(module, chosen, root))


def closure_digests(module: str, *, chosen: Chosen = NOTHING_CHOSEN, root: Path | None = None) -> Mapping[str, str]:
    """Return the digest of each module of the closure, by name."""
    found = sorted(_reach(module, chosen, root).items())
    return {name: _digest(_text(path)) for name, path in found}


def source_digests(module: str) -> list[tuple[str, str]]:
    """Return the file and the digest of each module of a custom module's closure: ``my_rewards.py``."""
    found = sorted(_reach(module, NOTHING_CHOSEN, None).items())
    ends = {name: "/__init__.py" if path.name == "__init__.py" else ".py" for name, path in found}
    return [(name.replace(".", "/") + ends[name], _digest(_text(path))) for name, path in found]


def libraries(module: str, *, chosen: Chosen = NOTHING_CHOSEN) -> frozenset[str]:
    """Return the external packages that the closure of ``module`` imports, at the top of a file or in a function.

    Imports for type checkers do not count.
    """
    reached = _reach(module, chosen, None)
    found = {name for path in reached.values() for name in imported_packages(_text(path))}
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
    """Return the commit of this checkout (``+dirty`` with changes), else ``RLCORE_CODE_VERSION``, else the version.

    Images that are built from a commit set ``RLCORE_CODE_VERSION``.
    """
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
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _reach(module: str, chosen: Chosen, root: Path | None) -> dict[str, Path]:
    found: dict[str, Path] = {}
    top, draws = module.partition(".")[0], module.endswith(".page")
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
    """Return the path of an external top-level module or package, without its suffix."""
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
    """Transformer that drops all bare strings; the result is compared, not compiled."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_text else node
