"""The code that a stage's key counts: imports, chosen rows of tables, digests, and remembered facts."""

from __future__ import annotations

import ast
import hashlib
import itertools
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlcore.tasks.store.code_hash import (
    NEUTRAL,
    closure_digest,
    closure_digests,
    imports_of,
    pins,
    pins_digest,
)
from rlcore.tasks.store.settings import Home

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
STEPS = ("rlcore.tasks.steps.train", "rlcore.tasks.steps.score")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in SOURCES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def digests(tree: Path) -> dict[str, str]:
    return {stage: closure_digest(stage, root=tree) for stage in STEPS}


def changed(tree: Path, name: str, text: str) -> set[str]:
    before = digests(tree)
    (tree / name).write_text(text)
    after = digests(tree)
    return {stage for stage in STEPS if before[stage] != after[stage]}


def test_a_closure_follows_imports_at_the_top_in_functions_and_by_name(tree: Path) -> None:
    assert closure_digests(TRAIN, root=tree).keys() == {TRAIN, "rlcore.learn", "rlcore.maths.deep"}
    assert closure_digests(SCORE, root=tree).keys() == {SCORE, "rlcore.grade", "rlcore.late"}


TRAIN, SCORE = STEPS
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
def test_an_edit_changes_the_stages_that_reach_it(tree: Path, name: str, text: str, stages: set[str]) -> None:
    assert changed(tree, name, text) == stages


def test_the_public_names_of_the_library_change_no_stage_that_imports_its_modules(tree: Path) -> None:
    (tree / "rlcore/tasks/steps/train.py").write_text("from rlcore.learn import f\nimport rlcore.maths.deep\n")
    assert "rlcore" not in closure_digests("rlcore.tasks.steps.train", root=tree)
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

    monkeypatch.setattr("rlcore.tasks.store.code_hash._MOMENT", 0.0)
    monkeypatch.setattr("rlcore.tasks.store.code_hash.ast.parse", disturbed)
    assert digests(tree) == before
    assert next(calls) > 1


@pytest.mark.parametrize("text", ["\ufeffX = 'e'\n".encode(), "# coding: latin-1\nX = 'é'\n".encode("latin-1")])
def test_a_module_is_decoded_as_python_decodes_it(tree: Path, text: bytes) -> None:
    (tree / "rlcore/grade.py").write_bytes(text)
    assert "rlcore.grade" in closure_digests("rlcore.tasks.steps.score", root=tree)


def test_every_neutral_folder_or_module_exists_so_that_a_rename_is_noticed() -> None:
    root = Path(__file__).resolve().parents[3]
    paths = {name: root / name.replace(".", "/") for name in NEUTRAL}
    files = {name: (path / "__init__.py", path.with_suffix(".py")) for name, path in paths.items()}
    assert [name for name, either in files.items() if not any(map(Path.is_file, either))] == []


# A function's module -> a package of the user's -> a module beside it; numpy and json are not the user's.
USERS = {
    "followed_rewards.py": "import json\nimport numpy\nfrom followed_helpers import words\ndef brief(rollouts): ...\n",
    "followed_helpers/__init__.py": "",
    "followed_helpers/words.py": "def f():\n    import followed_deep\n    return followed_deep.X\n",
    "followed_deep.py": "X = 1\n",
    "followed_alone.py": "Y = 1\n",
}


def test_a_users_module_is_followed_into_the_users_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in USERS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert closure_digests("followed_rewards").keys() == {"followed_rewards", "followed_helpers.words", "followed_deep"}
    before = closure_digest("followed_rewards")
    (tmp_path / "followed_alone.py").write_text("Y = 2\n")
    assert closure_digest("followed_rewards") == before
    (tmp_path / "followed_deep.py").write_text("X = 2\n")
    assert closure_digest("followed_rewards") != before


def test_our_modules_lead_to_no_code_of_the_user(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside.py").write_text("X = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    (tree / "rlcore/learn.py").write_text("import beside\n")
    assert "beside" not in closure_digests("rlcore.tasks.steps.train", root=tree)


TABLES = """
from typing import TYPE_CHECKING

from rlcore import always
from rlcore.choices import choices
from rlcore.fast import run
from rlcore.slow import walk
from rlcore.types import Prompt

if TYPE_CHECKING:
    from rlcore.hints import Hint


def _careful(prompt: Prompt) -> None:
    from rlcore.care import look
    _check(look(walk(prompt)))


def _check(found: object) -> None:
    import rlcore.check


def public(hint: Hint) -> None:
    always.f(WAYS)


WAYS = choices("way", {"fast": run, "slow": _careful, "free": lambda prompt: None})
"""
FAST, SLOW = {"rlcore.fast", "rlcore.fast.run"}, {"rlcore.slow", "rlcore.slow.walk", "rlcore.care", "rlcore.check"}


@pytest.mark.parametrize(
    ("chosen", "there", "absent"),
    [
        ({"way": frozenset({"fast"})}, FAST, SLOW),
        ({"way": frozenset({"slow"})}, SLOW, FAST),
        ({"way": frozenset({"free"})}, set(), FAST | SLOW),
        ({"way": frozenset()}, set(), FAST | SLOW),
        ({"another": frozenset()}, FAST | SLOW, set()),
        ({}, FAST | SLOW, set()),
    ],
)
def test_of_a_table_the_chosen_rows_count_with_the_private_functions_that_they_use(
    chosen: dict[str, frozenset[str]], there: set[str], absent: set[str]
) -> None:
    found = imports_of(TABLES, "rlcore.way", chosen)
    assert {"rlcore.always"} | there <= found
    assert not absent & found


def test_a_table_whose_rows_are_not_written_out_counts_whole() -> None:
    source = TABLES.replace('choices("way", {', "choices(setting, {")
    assert imports_of(source, "rlcore.way", {"way": frozenset()}) >= FAST | SLOW


def test_the_pins_name_the_interpreter_and_every_package_once_in_order() -> None:
    first, *lines = pins().splitlines()
    assert first == f"python=={platform.python_version()}"
    assert lines == sorted(set(lines))
    (pinned,) = [line.removeprefix("torch==") for line in lines if line.startswith("torch==")]
    assert pinned.partition("+")[0] == torch.__version__.partition("+")[0]  # the build, "+cu130", is not always named
    assert pins_digest() == hashlib.sha256(pins().encode()).hexdigest()


FACTS = """
from rlcore.tasks.store.remembered import remembered

@remembered
def shout(text):
    print("computed")
    return text.upper()
"""
ASK = """
import sys
from rlcore.tasks.store.remembered import remembering
from rlcore.tasks.store.settings import find_home
import facts

with remembering(find_home().source_facts):
    print(facts.shout(sys.argv[1]), flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def memo_home(tmp_path: Path) -> Home:
    made = Home(tmp_path / "home")
    made.cache.mkdir(parents=True)
    return made


@pytest.fixture
def ask(tmp_path: Path, memo_home: Home) -> Callable[[str], list[str]]:
    """Ask in a process of its own; returns its lines."""
    (tmp_path / "facts.py").write_text(FACTS)

    def in_a_process(text: str) -> list[str]:
        variables = os.environ | {"RLCORE_HOME": str(memo_home.root), "PYTHONPATH": str(tmp_path)}
        variables["PYTHONDONTWRITEBYTECODE"] = "1"  # Python's own compiled files are known by time and size
        done = subprocess.run(
            [sys.executable, "-c", ASK, text],
            capture_output=True,
            text=True,
            env=variables,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        return done.stdout.split()

    return in_a_process


def test_what_others_found_while_a_process_ran_stays(
    ask: Callable[[str], list[str]], tmp_path: Path, memo_home: Home
) -> None:
    variables = os.environ | {"RLCORE_HOME": str(memo_home.root), "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", ASK, "slow"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables) as slow:
        assert slow.stdout is not None and slow.stdout.readline() == "computed\n"
        assert slow.stdout.readline() == "SLOW\n"  # it has read the memo, and writes at its end
        assert ask("quick") == ["computed", "QUICK"]
        slow.communicate("")
    assert [ask("quick"), ask("slow")] == [["QUICK"], ["SLOW"]]


def test_what_a_process_found_is_known_to_the_next(ask: Callable[[str], list[str]]) -> None:
    assert ask("a") == ["computed", "A"]
    assert ask("a") == ["A"]
    assert ask("b") == ["computed", "B"]
    assert [ask("a"), ask("b")] == [["A"], ["B"]]


def test_changed_code_of_the_same_time_forgets(ask: Callable[[str], list[str]], tmp_path: Path) -> None:
    ask("a")
    path = tmp_path / "facts.py"
    before = path.stat()
    path.write_text(FACTS.replace("upper", "title"))  # as many characters
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert ask("ab") == ["computed", "Ab"]
    assert ask("a") == ["computed", "A"]


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_damaged_memo_is_no_memo(content: str, ask: Callable[[str], list[str]], memo_home: Home) -> None:
    ask("a")
    memo_home.source_facts.write_text(content)
    assert ask("a") == ["computed", "A"]
    assert ask("a") == ["A"]


def test_before_the_first_run_they_are_in_the_users_cache_and_the_home_stays_unmade(
    ask: Callable[[str], list[str]], memo_home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memo_home.cache.rmdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    assert [ask("a"), ask("a")] == [["computed", "A"], ["A"]]
    assert list(memo_home.root.iterdir()) == []
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")  # where nobody can write
    assert ask("a") == ask("a") == ["computed", "A"]
