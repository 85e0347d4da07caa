"""The axes in the signatures of rlcore's tensor functions, checked while tests call them.

rlcore writes ``Float[Tensor, "tokens"]`` for type checkers and readers, and never executes it: production pays nothing
and does not need jaxtyping. Here an import hook puts a check on each public function, method and dataclass whose
annotations have axes, before anything imports it. Axes of one name have one length within a call.

A check takes about 5 µs a tensor, which is as long as some of these functions take. So only the first calls of each
function in each test are checked.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any, get_type_hints

ROOMS = tuple(f"rlcore.{room}" for room in ("algorithms", "loop", "models", "training", "types"))
ROOMS += ("rlcore.hardware.sharded", "rlcore.text.packing")
CALLS = 10  # of each function that are checked in a test
DTYPES = ("Bool", "Float", "Float64", "Int", "Real", "Shaped")
_calls: Counter[Any] = Counter()  # that were checked since the test began


def begin_test() -> None:
    """From here on each function's first calls are checked again."""
    _calls.clear()


def install() -> None:
    """Check the axes in modules that are imported from now on; without jaxtyping, as beside the peers, in none."""
    if find_spec("jaxtyping") is not None:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not any(name == room or name.startswith(f"{room}.") for room in ROOMS):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    """Compiles each time: its bytecode must not be taken for that of the module itself."""

    def get_code(self, fullname: str) -> CodeType:
        tree = ast.parse(self.get_data(self.path), filename=self.path)
        for node in tree.body:
            _decorate(node)
        return compile(tree, self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        import jaxtyping
        from torch import Tensor

        names = {name: getattr(jaxtyping, name) for name in DTYPES}  # which the module imports for type checkers alone
        vars(module).update(names, Tensor=Tensor, checked_function=checked_function, checked_fields=checked_fields)
        super().exec_module(module)


def _decorate(node: ast.stmt) -> None:
    if isinstance(node, ast.ClassDef) and is_public(node):
        if any(has_axes(ast.unparse(each.annotation)) for each in fields_of(node)):
            node.decorator_list.insert(0, _named("checked_fields", node))
        for each in node.body:
            _decorate(each)
    elif isinstance(node, ast.FunctionDef) and is_public(node):
        hints = [ast.unparse(each) for each in (node.args, node.returns) if each]
        if any(map(has_axes, hints)):
            # The innermost: what the other decorators return is no plain function.
            node.decorator_list.append(_named("checked_function", node))


def is_public(node: ast.FunctionDef | ast.ClassDef) -> bool:
    """Return True if a caller may use it; constructors and calls are public as their class is."""
    return not node.name.startswith("_") or node.name in ("__init__", "__call__")


def fields_of(node: ast.ClassDef) -> list[ast.AnnAssign]:
    return [each for each in node.body if isinstance(each, ast.AnnAssign)]


def _named(name: str, place: ast.stmt) -> ast.expr:
    return ast.copy_location(ast.Name(name, ast.Load()), place)


def has_axes(annotation: str) -> bool:
    return any(f"{name}[" in annotation for name in DTYPES)


def checked_function(function: Any) -> Callable[..., Any]:
    """The function with a check of those arguments and results whose annotations have axes; others may be anything."""
    from beartype import beartype
    from jaxtyping import jaxtyped

    function.__annotations__ = {name: hint for name, hint in function.__annotations__.items() if has_axes(str(hint))}
    function.__annotations__ = get_type_hints(function)
    checking = beartype(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _calls[call] >= CALLS:
            return function(*args, **kwargs)
        _calls[call] += 1
        with jaxtyped("context"):  # half as costly as a function that is decorated with it
            return checking(*args, **kwargs)

    return call


def checked_fields(owner: Any) -> Any:
    """The dataclass, which checks the axes of its fields when it is made."""
    owner.__init__ = checked_function(owner.__init__)
    return owner
