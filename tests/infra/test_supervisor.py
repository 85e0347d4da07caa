from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from infra.services.commands import bring_up, take_down
from infra.services.layout import MARK, Layout, find_layout, save_layout
from infra.services.orphans import stop_orphans
from infra.services.supervisor import ServiceProcess
from infra.services.table import Service
from rlcore.errors import ServiceError
from tests.waiting import until


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    made = find_layout(tmp_path / "home")
    save_layout(made)
    return made


def keeper_of(layout: Layout, code: str) -> ServiceProcess:
    """A service that runs a line of Python."""
    row = Service(name="toy", command=lambda _: [sys.executable, "-c", code], is_ready=lambda _: True)
    return ServiceProcess(row, layout)


def look_until(keeper: ServiceProcess, holds: Callable[[], bool]) -> None:
    def looked() -> bool:
        keeper.poll()
        return holds()

    until(looked)


def test_a_service_that_dies_is_started_again_and_leaves_its_number(layout: Layout) -> None:
    keeper = keeper_of(layout, "import time; time.sleep(600)")
    keeper.poll()
    assert keeper.process is not None
    first = keeper.process
    assert (layout.root / "toy.pid").read_text() == f"{first.pid}\n"
    first.kill()
    first.wait()
    look_until(keeper, lambda: keeper.process not in (None, first))
    assert keeper.process.pid != first.pid
    keeper.end()
    assert not (layout.root / "toy.pid").exists()


def test_a_service_that_dies_at_once_is_waited_for_longer_each_time(layout: Layout) -> None:
    keeper, starts = keeper_of(layout, "print('no')"), []
    for _ in range(3):
        look_until(keeper, lambda: keeper.process is not None)
        starts.append(time.monotonic())
        assert keeper.process is not None
        keeper.process.wait()
        look_until(keeper, lambda: keeper.process is None)
    waits = [after - before for before, after in itertools.pairwise(starts)]
    assert waits[0] >= 1.0
    assert waits[1] >= 2.0
    assert layout.log("toy").read_text() == "no\n" * 3


def test_a_stop_ends_what_carries_its_mark_and_nothing_else(layout: Layout) -> None:
    command = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
    mine, other = (
        subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {MARK: mark})
        for mark in (str(layout.root), str(layout.root) + "-2")
    )
    with mine, other:
        for process in (mine, other):
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
        stop_orphans(layout)
        there = [psutil.pid_exists(process.pid) for process in (mine, other)]
        other.kill()
    assert there == [False, True]


def test_a_taken_port_is_named_before_anything_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("RLCORE_PREFECT_PORT", str(taken.getsockname()[1]))
        layout = find_layout(tmp_path / "home")
        with pytest.raises(ServiceError, match="of prefect is taken") as raised:
            bring_up(layout)
    assert "RLCORE_PREFECT_PORT" in raised.value.fix
    assert not layout.root.exists()


def test_to_take_down_what_never_ran_is_no_error(tmp_path: Path) -> None:
    assert "nothing runs" in take_down(find_layout(tmp_path / "home"))
