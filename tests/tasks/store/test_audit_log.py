"""The audit log: appending, repetition, and every kind of tampering."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlcore.errors import StorageError
from rlcore.tasks.store.audit_log import audit_path, chain_errors, read_entries, record_action
from rlcore.tasks.store.settings import Home


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path)
    for version in (1, 2, 3):
        record_action(home, "promote", "tiny-grpo", {"to": version})
    return home


def test_entries_follow_each_other(home: Home) -> None:
    entries = read_entries(home)
    assert [(each.number, each.details["to"]) for each in entries] == [(1, 1), (2, 2), (3, 3)]
    assert [each.previous for each in entries[1:]] == [each.digest for each in entries[:-1]]
    assert chain_errors(home) == ()


def test_a_repeated_act_adds_no_entry_and_another_subject_does(home: Home) -> None:
    assert record_action(home, "promote", "tiny-grpo", {"to": 3}).number == 3
    assert record_action(home, "gc", "home", {"bytes": 1}).number == 4
    assert record_action(home, "promote", "tiny-grpo", {"to": 3}).number == 3
    assert record_action(home, "promote", "tiny-grpo", {"to": 1}).number == 5


def _edit(lines: list[str]) -> list[str]:
    return [lines[0], json.dumps({**json.loads(lines[1]), "action": "approve"}), lines[2]]


def _reseal(lines: list[str]) -> list[str]:
    """Change an entry and give it the right digest."""
    from rlcore.tasks.store.audit_log import AuditEntry

    entry = AuditEntry(**{**json.loads(lines[1]), "action": "approve"})
    return [
        lines[0],
        json.dumps({**json.loads(lines[1]), "action": "approve", "digest": entry.computed_digest()}),
        lines[2],
    ]


@pytest.mark.parametrize(
    "tamper",
    [
        _edit,
        _reseal,
        lambda lines: lines[1:],
        lambda lines: [lines[0], lines[2]],
        lambda lines: [lines[1], lines[0], lines[2]],
        lambda lines: [*lines, lines[2]],
        lambda lines: [lines[0], "{}", lines[2]],
    ],
    ids=["edited", "edited and resealed", "first gone", "middle gone", "swapped", "repeated", "no entry"],
)
def test_a_gap_or_an_edit_is_found(home: Home, tamper: Callable[[list[str]], list[str]]) -> None:
    lines = audit_path(home).read_text(encoding="utf-8").splitlines()
    audit_path(home).write_text("\n".join(tamper(lines)) + "\n", encoding="utf-8")
    assert chain_errors(home)


def test_a_line_that_a_kill_cut_off_is_replaced_by_the_next_entry(home: Home) -> None:
    with audit_path(home).open("a", encoding="utf-8") as file:
        file.write('{"number": 4, "ti')
    assert len(read_entries(home)) == 3
    assert record_action(home, "gc", "home", {}).number == 4
    assert chain_errors(home) == ()


def test_a_damaged_log_is_not_continued(home: Home) -> None:
    audit_path(home).write_text("no entry\n", encoding="utf-8")
    with pytest.raises(StorageError, match="line 1: not an entry"):
        record_action(home, "gc", "home", {})
