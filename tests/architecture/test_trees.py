"""The README of each top folder has a tree of its modules, and the tree is true."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.source_files import ROOT

FOLDERS = ("rlcore", "tasks", "flows", "data_contracts", "infra", "tests", "benchmarks", "docs")
SAID_BY_THEIR_FOLDER = ("__init__.py", "README.md")
LINE = re.compile(r"(?P<indent>(?:  )+)(?P<name>\S+?)(?P<slash>/?) {2,}\S")


def tree(folder: str) -> Iterator[str]:
    """The paths that the tree of a folder's README names, relative to the folder."""
    text = (ROOT / folder / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"^```\n{folder}/\n(.+?)^```$", text, re.DOTALL | re.MULTILINE)
    assert found, f"{folder}/README.md has no code block that begins with '{folder}/'"
    above: list[str] = []
    for line in found[1].splitlines():
        match = LINE.match(line)
        assert match, f"{folder}/README.md: {line!r} is no name with two blanks and what it is"
        depth = len(match["indent"]) // 2 - 1
        assert depth <= len(above), f"{folder}/README.md: {line!r} is below nothing"
        above[depth:] = [match["name"]]
        yield "/".join(above)


def modules(folder: str) -> set[str]:
    """What the tree of a folder has to name: modules, of ``tests`` those that are no tests, of ``docs`` the pages."""
    paths = (ROOT / folder).rglob("*.md" if folder == "docs" else "*.py")
    return {
        str(path.relative_to(ROOT / folder))
        for path in paths
        if path.name not in SAID_BY_THEIR_FOLDER and not path.name.startswith("test_")
    }


def folders(folder: str) -> set[str]:
    """The folders below a folder that have modules or tests."""
    inner = {path.parent for path in (ROOT / folder).rglob("*.py")} - {ROOT / folder}
    return {str(path.relative_to(ROOT / folder)) for path in inner}


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_module_of_a_folder_is_in_its_tree(folder: str) -> None:
    assert (modules(folder) | folders(folder)) - set(tree(folder)) == set(), f"add a line to {folder}/README.md"


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_name_in_a_tree_exists_and_stands_there_once(folder: str) -> None:
    named = list(tree(folder))
    absent = [name for name in named if not Path(ROOT / folder / name).exists()]
    assert absent == [], f"take these lines out of {folder}/README.md"
    assert len(named) == len(set(named))
