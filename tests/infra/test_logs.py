"""Logs are rotated while a service writes them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infra.services import supervisor
from infra.services.supervisor import KEPT, rotate
from tests.processes import wait_for_line

DAY = 86_400.0
WRITER = """
import os, sys
for line in sys.stdin:
    os.write(2, line.encode())
    print("written", flush=True)
"""


def test_a_service_that_holds_its_log_open_goes_on_writing_to_the_emptied_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "MAX_BYTES", 100)
    log = tmp_path / "toy.log"
    with (
        log.open("ab") as file,
        subprocess.Popen(
            [sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True
        ) as service,
    ):
        assert service.stdin is not None
        for number in range(KEPT + 3):
            service.stdin.write(f"{number} " + "x" * 120 + "\n")
            service.stdin.flush()
            wait_for_line(service, "written")
            rotate(log, began=time.time())
            assert log.stat().st_size == 0
        service.stdin.close()
    kept = [(tmp_path / f"toy.log.{place}").read_text().split()[0] for place in range(1, KEPT + 1)]
    assert kept == ["6", "5", "4", "3"]
    assert len(list(tmp_path.iterdir())) == 1 + KEPT


def test_a_log_of_more_than_a_week_is_rotated_and_one_of_more_than_a_month_removed(tmp_path: Path) -> None:
    log, first, last = (tmp_path / name for name in ("toy.log", "toy.log.1", "toy.log.4"))
    rotate(log, began=0.0)  # there is none yet
    log.write_text("lines")
    rotate(log, began=time.time() - 6 * DAY)
    assert not first.exists()
    rotate(log, began=time.time() - 8 * DAY)
    assert (first.read_text(), log.read_text()) == ("lines", "")
    rotate(log, began=0.0)  # nothing to rotate
    log.write_text("more")
    rotate(log, began=0.0)
    assert log.read_text() == "more"  # younger than a week: it was emptied just now
    os.utime(first, (time.time() - 8 * DAY,) * 2)
    last.write_text("old")
    os.utime(last, (time.time() - 31 * DAY,) * 2)
    rotate(log, began=0.0)
    assert (first.read_text(), (tmp_path / "toy.log.2").read_text(), last.exists()) == ("more", "lines", False)
