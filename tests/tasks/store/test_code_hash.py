from __future__ import annotations

import ast
import itertools
import os
from pathlib import Path

import pytest

from rlcore.errors import StorageError
from rlcore.tasks.store.code_hash import NEUTRAL, closure, closure_digest, closure_digests, code_version

# rlcore.tasks.steps.train -> rlcore.learn (at the top) -> rlcore.maths.deep (inside a function, relative)
# rlcore.tasks.steps.score -> rlcore.grade ("from rlcore import grade") and, through import_module, rlcore.late
SOURCES = {
    "rlcore/__init__.py": "",
    "rlcore/learn.py": "def f():\n    from .maths import deep\n    return deep.g()\n",
    "rlcore/maths/__init__.py": '"""Maths."""\n',
    "rlcore/maths/deep.py": "import math\n\n\ndef g():\n    return math.pi\n",
    "rlcore/grade.py": "def h():\n    return 1\n",
    "rlcore/late.py": "X = 1\n",
    "rlcore/unused.py": "Y = 1\n",
    "rlcore/config/__init__.py": "Z = 1\n",
    "rlcore/config/rl.py": "Z = 1\n",
    "rlcore/tasks/__init__.py": "",
    "rlcore/tasks/steps/__init__.py": "",
    "rlcore/tasks/run/stages.py": "from rlcore import unused\n",
    "rlcore/tasks/steps/train.py": "from rlcore.learn import f\nfrom rlcore import config\n"
    "from rlcore.config.rl import Z\nfrom rlcore.tasks.run.stages import unused\n",
    "rlcore/tasks/steps/score.py": "import importlib\nfrom rlcore import grade\n\n\ndef s():\n"
    '    return importlib.import_module("rlcore.late")\n',
}
STAGES = ("rlcore.tasks.steps.train", "rlcore.tasks.steps.score")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in SOURCES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def digests(tree: Path) -> dict[str, str]:
    return {stage: closure_digest(stage, root=tree) for stage in STAGES}


def changed(tree: Path, name: str, text: str) -> set[str]:
    before = digests(tree)
    (tree / name).write_text(text)
    after = digests(tree)
    return {stage for stage in STAGES if before[stage] != after[stage]}


def test_a_closure_follows_imports_at_the_top_in_functions_and_by_name(tree: Path) -> None:
    assert closure(TRAIN, root=tree) == {TRAIN, "rlcore.learn", "rlcore.maths.deep"}
    assert closure(SCORE, root=tree) == {SCORE, "rlcore.grade", "rlcore.late"}


TRAIN, SCORE = STAGES
LAYOUT = '"""Deep."""\n\nimport math  # for pi\n\n\ndef g():\n    """Pi."""\n    return (\n        math.pi\n    )\n'


@pytest.mark.parametrize(
    ("name", "text", "stages"),
    [
        ("rlcore/maths/deep.py", "import math\n\n\ndef g():\n    return math.e\n", {TRAIN}),
        ("rlcore/maths/deep.py", LAYOUT, set()),
        ("rlcore/grade.py", "def h():\n    return 2\n", {SCORE}),
        ("rlcore/grade.py", "def h(x=1):\n    return 1\n", {SCORE}),  # a default is code
        ("rlcore/late.py", "X = 2\n", {SCORE}),
        ("rlcore/unused.py", "Y = 2\n", set()),
        ("rlcore/__init__.py", "import os\n", {TRAIN, SCORE}),
        ("rlcore/maths/__init__.py", '"""Nothing but mathematics."""\n', set()),
        ("rlcore/maths/__init__.py", "X = 1\n", {TRAIN}),
        # Orchestration, and the types of a configuration.
        ("rlcore/tasks/run/stages.py", "import os\n", set()),
        ("rlcore/config/__init__.py", "import os\n", set()),
        ("rlcore/config/rl.py", "import os\n", set()),
    ],
)
def test_an_edit_changes_exactly_the_stages_that_reach_its_code(
    tree: Path, name: str, text: str, stages: set[str]
) -> None:
    assert changed(tree, name, text) == stages


def test_the_public_names_of_the_library_change_no_stage_that_imports_its_modules(tree: Path) -> None:
    (tree / "rlcore/tasks/steps/train.py").write_text("from rlcore.learn import f\nimport rlcore.maths.deep\n")
    assert "rlcore" not in closure("rlcore.tasks.steps.train", root=tree)
    assert changed(tree, "rlcore/__init__.py", "import os\n") == {"rlcore.tasks.steps.score"}
    assert changed(tree, "rlcore/maths/__init__.py", "import os\n") == {"rlcore.tasks.steps.train"}


def test_another_thread_that_parses_at_the_same_time_ends_no_run(monkeypatch: pytest.MonkeyPatch, tree: Path) -> None:
    before, parse, calls = digests(tree), ast.parse, itertools.count()
    for name in SOURCES:
        (tree / name).write_text((tree / name).read_text() + "# a text of which no tree is kept yet\n")

    def disturbed(source: str) -> ast.Module:
        if next(calls) % 2 == 0:
            raise SystemError("AST constructor recursion depth mismatch (before=54, after=77)")
        return parse(source)

    monkeypatch.setattr("rlcore.tasks.store.imports._MOMENT", 0.0)
    monkeypatch.setattr("rlcore.tasks.store.imports.ast.parse", disturbed)
    assert digests(tree) == before
    assert next(calls) > 1


def test_an_edit_is_seen_at_once_even_when_the_file_keeps_its_time(tree: Path) -> None:
    before = closure_digest(TRAIN, root=tree)
    path = tree / "rlcore/maths/deep.py"
    stamp = path.stat()
    path.write_text("import math\n\n\ndef g():\n    return math.ex\n")
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert closure_digest(TRAIN, root=tree) != before


@pytest.mark.parametrize("text", ["\ufeffX = 'e'\n".encode(), "# coding: latin-1\nX = 'é'\n".encode("latin-1")])
def test_a_module_is_decoded_as_python_decodes_it(tree: Path, text: bytes) -> None:
    (tree / "rlcore/grade.py").write_bytes(text)
    assert "rlcore.grade" in closure_digests("rlcore.tasks.steps.score", root=tree)


def test_a_module_without_source_is_refused(tree: Path) -> None:
    with pytest.raises(StorageError, match=r"tasks\.nothing"):
        closure("tasks.nothing", root=tree)


def test_a_users_package_is_followed_too(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tree / "elsewhere" / "rlcore_user_stage"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "stage.py").write_text("from rlcore_user_stage import helper\nfrom rlcore.types import Prompt\n")
    (package / "helper.py").write_text("X = 1\n")
    monkeypatch.syspath_prepend(str(package.parent))
    followed = {"rlcore_user_stage.stage", "rlcore_user_stage.helper", "rlcore.types"}
    assert closure("rlcore_user_stage.stage") == followed


def test_the_digests_of_our_own_code_name_modules_that_exist() -> None:
    found = closure_digests("rlcore.loop.run")
    assert {"rlcore.loop.run", "rlcore.loop.iteration", "rlcore.types"} <= set(found)
    assert not set(found) & set(NEUTRAL)
    assert code_version()


def test_every_neutral_folder_or_module_exists_so_that_a_rename_is_noticed() -> None:
    root = Path(__file__).resolve().parents[3]
    paths = {name: root / name.replace(".", "/") for name in NEUTRAL}
    files = {name: (path / "__init__.py", path.with_suffix(".py")) for name, path in paths.items()}
    assert [name for name, either in files.items() if not any(map(Path.is_file, either))] == []


def test_rows_of_a_table_that_are_not_chosen_are_not_followed(tree: Path) -> None:
    (tree / "rlcore/learn.py").write_text('from rlcore import late, maths\nT = choices("t", {"a": late, "b": maths})\n')
    for row, module in (("a", "rlcore.late"), ("b", "rlcore.maths")):
        found = closure("rlcore.tasks.steps.train", chosen={"t": frozenset({row})}, root=tree)
        assert found - {"rlcore.maths"} == {"rlcore.tasks.steps.train", "rlcore.learn", module} - {"rlcore.maths"}


# A function's module -> a package of the user's -> a module beside it; numpy and json are not the user's.
USERS = {
    "followed_rewards.py": "import json\nimport numpy\nfrom followed_helpers import words\ndef brief(rollouts): ...\n",
    "followed_helpers/__init__.py": "",
    "followed_helpers/words.py": "def f():\n    import followed_deep\n    return followed_deep.X\n",
    "followed_deep.py": "X = 1\n",
    "followed_alone.py": "Y = 1\n",
}


def test_a_users_module_is_followed_into_the_users_own_code_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in USERS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert closure("followed_rewards") == {
        "followed_rewards",
        "followed_helpers.words",
        "followed_deep",
    }
    before = closure_digest("followed_rewards")
    (tmp_path / "followed_alone.py").write_text("Y = 2\n")
    assert closure_digest("followed_rewards") == before
    (tmp_path / "followed_deep.py").write_text("X = 2\n")
    assert closure_digest("followed_rewards") != before


def test_our_own_modules_are_not_followed_into_what_lies_beside_the_user(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside.py").write_text("X = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    (tree / "rlcore/learn.py").write_text("import beside\n")
    assert "beside" not in closure("rlcore.tasks.steps.train", root=tree)
