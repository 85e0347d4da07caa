from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.architecture.source_files import ROOT, imported, modules, nodes

_TRACKING = (
    "runs", "mlflow_model", "registry", "traces", "database", "retry", "lineage", "mlflow_access",
)  # fmt: skip
IMPORTERS = {  # the only files that may import a library, so that it can be replaced or left out in one place
    "mlflow": {f"tasks/tracking/{name}.py" for name in _TRACKING},
    "datasets": {"tasks/steps/data.py", "benchmarks/peers/trl.py"},
    "fsspec": {"tasks/store/shared.py"},
    "bitsandbytes": {"rlcore/training/optim.py"},
    "peft": {"rlcore/models/lora.py"},
    "vllm": {f"rlcore/sampling/vllm/{name}.py" for name in ("transfer", "worker/receiver")},
    "ray": {"rlcore/distributed/cluster/ray_cluster.py"},
}


def importers(library: str) -> list[str]:
    return [path for path in modules() if any(name.partition(".")[0] == library for name, _ in imported(nodes(path)))]


def test_a_module_says_in_its_docstring_what_lives_there() -> None:
    written = {path: tree for path, tree in modules().items() if tree.body or Path(path).name != "__init__.py"}
    assert [path for path, tree in written.items() if not ast.get_docstring(tree)] == []


def test_what_is_public_has_a_docstring() -> None:
    definitions = [
        (path, node)
        for path, tree in modules().items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not ast.get_docstring(node)
    ]
    public = [(path, node.name) for path, node in definitions if not node.name.startswith("_") and node.name != "main"]
    assert public == []


@pytest.mark.parametrize("library", sorted(IMPORTERS))
def test_a_library_is_imported_only_where_it_is_wrapped(library: str) -> None:
    assert set(importers(library)) <= IMPORTERS[library]


def test_nothing_imports_the_tests_or_the_infrastructure() -> None:
    assert importers("tests") == importers("infra") == []


def test_contracts_know_nothing_else_of_ours() -> None:
    paths = [path for path in modules() if path.startswith("data_contracts/")]
    read = {name for path in paths for name, _ in imported(nodes(path)) if name.startswith("rlcore")}
    assert {name for name in read if not name.startswith("rlcore.data_contracts")} == set()


def test_the_walk_sees_all_packages() -> None:
    assert {path.partition("/")[0] for path in modules()} >= {"rlcore", "tasks", "flows", "data_contracts"}
    assert (ROOT / "pyproject.toml").is_file()
