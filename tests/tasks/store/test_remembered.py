"""Facts that processes keep for each other: believed for the code and the texts that they were found for alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlcore.tasks.store.settings import Home

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
    print(facts.shout(sys.argv[1]))
"""


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path / "home")
    made.cache.mkdir(parents=True)
    return made


@pytest.fixture
def ask(tmp_path: Path, home: Home) -> Callable[[str], list[str]]:
    """Ask in a process of its own; returns its lines."""
    (tmp_path / "facts.py").write_text(FACTS)

    def in_a_process(text: str) -> list[str]:
        variables = os.environ | {"RLCORE_HOME": str(home.root), "PYTHONPATH": str(tmp_path)}
        variables["PYTHONDONTWRITEBYTECODE"] = "1"  # Python's own compiled files are known by time and size
        done = subprocess.run(
            [sys.executable, "-c", ASK, text], capture_output=True, text=True, env=variables, check=True
        )
        return done.stdout.split()

    return in_a_process


def test_what_a_process_found_is_known_to_the_next(ask: Callable[[str], list[str]]) -> None:
    assert ask("a") == ["computed", "A"]
    assert ask("a") == ["A"]
    assert ask("b") == ["computed", "B"]
    assert [ask("a"), ask("b")] == [["A"], ["B"]]


def test_code_that_changes_within_a_tick_of_the_clock_finds_anew(
    ask: Callable[[str], list[str]], tmp_path: Path
) -> None:
    ask("a")
    path = tmp_path / "facts.py"
    before = path.stat()
    path.write_text(FACTS.replace("upper", "title"))  # as many characters
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert ask("ab") == ["computed", "Ab"]
    assert ask("a") == ["computed", "A"]


@pytest.mark.parametrize("content", ["", "{", "[1]", '"A"', "{}"])
def test_a_damaged_memo_is_no_memo(content: str, ask: Callable[[str], list[str]], home: Home) -> None:
    ask("a")
    home.source_facts.write_text(content)
    assert ask("a") == ["computed", "A"]
    assert ask("a") == ["A"]


def test_a_truncated_memo_is_no_memo(ask: Callable[[str], list[str]], home: Home) -> None:
    ask("a")
    whole = home.source_facts.read_bytes()
    home.source_facts.write_bytes(whole[: len(whole) // 2])
    assert ask("a") == ["computed", "A"]


def test_facts_of_another_version_are_not_taken(ask: Callable[[str], list[str]], home: Home) -> None:
    ask("a")
    kept = json.loads(home.source_facts.read_text())
    home.source_facts.write_text(json.dumps({f"0{key[1:]}" if key[0] != "0" else f"1{key[1:]}": "Z" for key in kept}))
    assert ask("a") == ["computed", "A"]


def test_before_the_first_run_they_are_in_the_users_cache_and_the_home_stays_unmade(
    ask: Callable[[str], list[str]], home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.cache.rmdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    assert [ask("a"), ask("a")] == [["computed", "A"], ["A"]]
    assert list(home.root.iterdir()) == []
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")  # where nobody can write
    assert ask("a") == ask("a") == ["computed", "A"]
