from __future__ import annotations

import re
from pathlib import Path

from rlcore.tasks.store.passwords import draw, passwords, write_private


def test_a_password_is_long_unlike_the_others_and_needs_no_quotes() -> None:
    drawn = {draw() for _ in range(100)}
    assert len(drawn) == 100
    assert all(re.fullmatch(r"[\w-]{32}", each, re.ASCII) for each in drawn)


def test_passwords_are_drawn_once_and_a_new_name_is_added_to_the_old_ones(tmp_path: Path) -> None:
    path = tmp_path / "passwords.json"
    first = passwords(path, ("a", "b"))
    assert path.stat().st_mode & 0o777 == 0o600
    assert passwords(path, ("a", "b")) == first
    assert passwords(path, ("b", "c")) == {**first, "c": passwords(path, ("c",))["c"]}
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_is_private_from_the_start_whatever_was_there(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("old")
    path.chmod(0o666)
    write_private(path, "new")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new", 0o600)
    assert [each.name for each in tmp_path.iterdir()] == ["secret"]
