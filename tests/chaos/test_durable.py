"""Files that a note, a digest or a rename calls complete are on the disk before: a power cut, too, loses none."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rlcore.tasks.drawing.result import Result
from rlcore.tasks.run.pages import is_drawn, show_pages
from rlcore.tasks.store.artifacts import ArtifactStore
from rlcore.tasks.store.audit_log import audit_path, record_action
from rlcore.tasks.store.passwords import write_private
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import write_json
from tests.chaos.toy import draw
from tests.tasks.run.toy_stages import open_run


def page(home: Home) -> list[Path]:
    folder = home.pages / "toy" / "page" / "0123"
    result = Result(preset="toy", stage="page", confidence=0.95, data=home.root, inputs={}, levels={})
    show_pages(draw, result, folder, open_run(home).parent)
    assert is_drawn(draw, result, folder)
    return [folder, folder / "page.md", folder.with_suffix(".code")]


def artifact(home: Home) -> list[Path]:
    folder = home.work / "output"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text("{}", encoding="utf-8")
    ref = ArtifactStore(home.root).commit(folder, kind="model")
    stored = home.root / ref.uri
    return [stored.parent, stored, *stored.rglob("*")]


def audit(home: Home) -> list[Path]:
    record_action(home, "promote", "tiny-grpo/1", {"to": "1"})
    return [audit_path(home), home.root]


def password(home: Home) -> list[Path]:
    write_private(home.root / "passwords.json", "{}")
    return [home.root / "passwords.json"]


def table(home: Home) -> list[Path]:
    write_json({}, home.root / "state" / "note.json")
    return [home.root / "state" / "note.json", home.root / "state"]


@pytest.mark.parametrize("write", [page, artifact, audit, password, table])
def test_files_are_on_the_disk_before_they_count_as_complete(
    tracked_home: Home, monkeypatch: pytest.MonkeyPatch, write: Callable[[Home], list[Path]]
) -> None:
    synced, call = set[int](), os.fsync

    def watched(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        call(descriptor)

    monkeypatch.setattr(os, "fsync", watched)  # a power cut cannot be provoked
    written = write(tracked_home)
    assert [path for path in written if path.stat().st_ino not in synced] == []
