"""Backups and restores that are killed again and again: nothing is lost, and nothing half is taken for whole."""

from __future__ import annotations

import shutil
from pathlib import Path

from rlcore.tasks.operations.backup_target import BackupTarget
from rlcore.tasks.operations.restore import restore
from rlcore.tasks.store.audit_log import chain_errors, read_entries
from rlcore.tasks.store.settings import Home
from tests.chaos.books import books, differences
from tests.chaos.chain import COMMAND, run_killed
from tests.chaos.killer import ROOT as WATCHED
from tests.flows.conftest import ROOT, environment
from tests.flows.warm import run_warm

PLAN = "20:5"  # percent of the events, and which


def killed(arguments: list[str], home: Path, folder: Path) -> list[str]:
    """Events at which the command was killed until it ended; it writes below ``folder``."""
    ledger = folder.parent / f"{home.name}-events"
    variables = {WATCHED: str(folder), "TEST_NO_DATABASE": "1"}
    kills = run_killed(arguments, home, ledger, plan=PLAN, variables=variables, call=COMMAND)
    events = ledger.read_text(encoding="utf-8").splitlines()
    assert kills == len(events) >= 5
    return events


def test_a_backup_that_is_killed_several_times_is_whole_and_so_is_each_that_is_listed(
    undisturbed: Path, tmp_path: Path
) -> None:
    watched = tmp_path / "watched"
    home, target = watched / "home", str(watched / "target")
    shutil.copytree(undisturbed, home)
    events = killed(["backup", target], home, watched)
    assert {event.split()[0] for event in events} >= {"copyfile"}
    names = BackupTarget(target).names()
    assert names
    for folder in (home, *(tmp_path / name for name in names)):
        if folder != home:
            restore(Home(folder), target, folder.name)
        assert differences(books(undisturbed), books(folder)) == []
    assert read_entries(Home(home))[-1].details["name"] == names[-1]


def test_a_restore_that_is_killed_several_times_ends_with_the_same_books(undisturbed: Path, tmp_path: Path) -> None:
    target, home = tmp_path / "target", tmp_path / "watched" / "home"
    assert run_warm(["backup", str(target)], environment(undisturbed), ROOT).returncode == 0
    killed(["restore", str(target)], home, home)
    assert differences(books(undisturbed), books(home)) == []
    assert [each.action for each in read_entries(Home(home))][-1] == "restore"
    assert chain_errors(Home(home)) == ()


def test_the_same_books_need_all_files(undisturbed: Path, tmp_path: Path) -> None:
    assert run_warm(["backup", str(tmp_path / "target")], environment(undisturbed), ROOT).returncode == 0
    restore(Home(tmp_path / "home"), str(tmp_path / "target"))
    next((tmp_path / "home" / "mlartifacts").rglob("page.md")).unlink()
    assert len(differences(books(undisturbed), books(tmp_path / "home"))) == 1
