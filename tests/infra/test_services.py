"""``make services``: folder, ports, passwords, environments, supervisor, logs, and what the server is asked for."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from infra.services import provision, supervisor
from infra.services.__main__ import bring_up, take_down
from infra.services.deployments import all_deployments, write_deployments
from infra.services.layout import (
    MARK,
    Layout,
    clients,
    environment,
    find_layout,
    passwords,
    save_layout,
    saved_layout,
    write_client_file,
)
from infra.services.supervisor import KEPT, ServiceProcess, rotate, stop_orphans
from infra.services.table import SERVICES, Service
from rlcore.errors import ConfigError, ServiceError, StorageError
from tests.architecture.source_files import ROOT
from tests.processes import wait_for_line
from tests.waiting import until


@pytest.fixture
def layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Layout:
    for name in ("RLCORE_SERVICES", "RLCORE_POSTGRES_PORT", "RLCORE_PREFECT_PORT", "RLCORE_MLFLOW_PORT"):
        monkeypatch.delenv(name, raising=False)
    return find_layout(tmp_path / "home")


def test_state_is_in_the_home_and_every_port_can_be_set(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (layout.root, dict(layout.ports)) == (
        layout.home / "services",
        {"postgres": 5442, "prefect": 4200, "mlflow": 5000},
    )
    monkeypatch.setenv("RLCORE_MLFLOW_PORT", "5001")
    assert find_layout(layout.home).url("mlflow") == "http://127.0.0.1:5001"


@pytest.mark.parametrize("port", ["0", "65536", "http", "-1", "4200"])
def test_what_is_no_port_of_its_own_is_refused(layout: Layout, monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    monkeypatch.setenv("RLCORE_MLFLOW_PORT", port)
    with pytest.raises(ConfigError):
        find_layout(layout.home)


def test_passwords_are_drawn_once_and_are_for_their_owner_alone(layout: Layout) -> None:
    save_layout(layout)
    drawn = passwords(layout)
    assert passwords(layout) == drawn
    assert len(set(drawn.values())) == 5
    assert (layout.root / "passwords.json").stat().st_mode & 0o777 == 0o600
    assert all(len(each) >= 32 and each.replace("-", "").replace("_", "").isalnum() for each in drawn.values())


def test_a_password_stands_in_the_environment_of_its_user_alone(layout: Layout) -> None:
    save_layout(layout)
    drawn = passwords(layout)
    holders = {
        role: [name for name in ("postgres", "prefect", "mlflow", "worker") if secret in str(environment(layout, name))]
        for role, secret in drawn.items()
    }
    assert holders == {
        "postgres": [],
        "prefect": ["prefect"],
        "mlflow": ["mlflow"],
        "web": ["prefect", "mlflow", "worker"],
        "mlflow_sessions": ["mlflow"],
    }


def test_prefect_forgets_old_runs_as_in_containers(layout: Layout) -> None:
    save_layout(layout)
    compose = yaml.safe_load((ROOT / "infra" / "compose.yaml").read_text(encoding="utf-8"))
    contained = compose["services"]["prefect"]["environment"]
    limits = {name: value for name, value in contained.items() if "VACUUM" in name or "RETENTION" in name}
    assert len(limits) == 3
    assert limits.items() <= environment(layout, "prefect").items()


def test_a_shell_that_reads_the_private_file_is_a_client_of_these_servers(layout: Layout) -> None:
    save_layout(layout)
    write_client_file(layout)
    assert layout.client_file.stat().st_mode & 0o777 == 0o600
    command = ["sh", "-c", f". {layout.client_file}; env"]
    output = subprocess.run(command, capture_output=True, text=True, env={}, check=True).stdout
    found = dict(line.split("=", 1) for line in output.splitlines())
    assert {name: found[name] for name in clients(layout)} == clients(layout)
    web = passwords(layout)["web"]
    assert (found["PREFECT_API_AUTH_STRING"], found["MLFLOW_TRACKING_PASSWORD"]) == (f"rlcore:{web}", web)


def test_both_servers_ask_for_a_password_and_check_host_and_origin(layout: Layout) -> None:
    save_layout(layout)
    prefect, mlflow = (environment(layout, name) for name in ("prefect", "mlflow"))
    assert prefect["PREFECT_SERVER_API_AUTH_STRING"] == clients(layout)["PREFECT_API_AUTH_STRING"]
    assert prefect["RLCORE_PREFECT_HOSTS"] == "127.0.0.1,localhost"
    assert mlflow["MLFLOW_AUTH_ADMIN_PASSWORD"] == clients(layout)["MLFLOW_TRACKING_PASSWORD"]
    assert mlflow["MLFLOW_SERVER_ALLOWED_HOSTS"] == "127.0.0.1:5000,localhost:5000"
    rows = {each.name: each.command(layout) for each in SERVICES if each.name in ("prefect", "mlflow")}
    assert rows["prefect"][2].endswith("tasks/operations/prefect_server.py")
    assert "basic-auth" in rows["mlflow"]


def test_files_of_runs_go_to_the_configured_destination_or_into_the_folder(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_layout(layout)
    monkeypatch.delenv("MLFLOW_ARTIFACTS_DESTINATION", raising=False)
    assert environment(layout, "mlflow")["MLFLOW_ARTIFACTS_DESTINATION"] == layout.artifacts.as_uri()
    monkeypatch.setenv("MLFLOW_ARTIFACTS_DESTINATION", "s3://bucket/rlcore")
    assert environment(layout, "mlflow")["MLFLOW_ARTIFACTS_DESTINATION"] == "s3://bucket/rlcore"


def test_later_commands_find_the_ports_of_what_runs(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    assert saved_layout(layout) == layout
    save_layout(layout)
    monkeypatch.setenv("RLCORE_PREFECT_PORT", "4300")
    assert saved_layout(find_layout(layout.home)) == layout


def test_the_services_of_a_copied_home_are_those_of_the_copy(layout: Layout, tmp_path: Path) -> None:
    save_layout(layout)
    copy = tmp_path / "copy"
    shutil.copytree(layout.home, copy)
    found = saved_layout(find_layout(copy))
    assert (found.home, found.root) == (copy, copy / "services")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, layout: Layout) -> None:
    (tmp_path / "home").write_text("a file")
    with pytest.raises(StorageError, match="services"):
        save_layout(layout)


@pytest.fixture
def saved(tmp_path: Path) -> Layout:
    made = find_layout(tmp_path / "home")
    save_layout(made)
    return made


def keeper_of(saved: Layout, code: str) -> ServiceProcess:
    """A service that runs a line of Python."""
    row = Service(name="toy", command=lambda _: [sys.executable, "-c", code], is_ready=lambda _: True)
    return ServiceProcess(row, saved)


def look_until(keeper: ServiceProcess, holds: Callable[[], bool]) -> None:
    def looked() -> bool:
        keeper.poll()
        return holds()

    until(looked)


def test_a_service_that_dies_is_started_again_and_leaves_its_number(saved: Layout) -> None:
    keeper = keeper_of(saved, "import time; time.sleep(600)")
    keeper.poll()
    assert keeper.process is not None
    first = keeper.process
    assert (saved.root / "toy.pid").read_text() == f"{first.pid}\n"
    first.kill()
    first.wait()
    look_until(keeper, lambda: keeper.process not in (None, first))
    assert keeper.process.pid != first.pid
    keeper.end()
    assert not (saved.root / "toy.pid").exists()


def test_a_service_that_dies_at_once_is_waited_for_longer_each_time(saved: Layout) -> None:
    keeper, starts = keeper_of(saved, "print('no')"), []
    for _ in range(3):
        look_until(keeper, lambda: keeper.process is not None)
        starts.append(time.monotonic())
        assert keeper.process is not None
        keeper.process.wait()
        look_until(keeper, lambda: keeper.process is None)
    waits = [after - before for before, after in itertools.pairwise(starts)]
    assert waits[0] >= 1.0
    assert waits[1] >= 2.0
    assert saved.log("toy").read_text() == "no\n" * 3


def test_a_stop_ends_what_carries_its_mark_and_nothing_else(saved: Layout) -> None:
    command = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
    mine, other = (
        subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {MARK: mark})
        for mark in (str(saved.root), str(saved.root) + "-2")
    )
    with mine, other:
        for process in (mine, other):
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
        stop_orphans(saved)
        there = [psutil.pid_exists(process.pid) for process in (mine, other)]
        other.kill()
    assert there == [False, True]


def test_a_taken_port_is_named_before_anything_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("RLCORE_PREFECT_PORT", str(taken.getsockname()[1]))
        saved = find_layout(tmp_path / "home")
        with pytest.raises(ServiceError, match="of prefect is taken") as raised:
            bring_up(saved)
    assert "RLCORE_PREFECT_PORT" in raised.value.fix
    assert not saved.root.exists()


def test_to_take_down_what_never_ran_is_no_error(tmp_path: Path) -> None:
    assert "nothing runs" in take_down(find_layout(tmp_path / "home"))


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


ALL = len(all_deployments())


@pytest.fixture
def provisioned(tmp_path: Path) -> Layout:
    made = find_layout(tmp_path)
    made.root.mkdir()
    provision.stamp_path(made).write_text(provision._digest())
    write_deployments(provision._file(made))
    return made


def server(*, lost: int = 0, limit: int | None = 1) -> Callable[..., Any]:
    """A server that has all that it is asked for, but for ``lost`` of each kind."""

    def ask(_: Layout, __: str, path: str, question: Any = None) -> Any:
        if question is None:
            return {"concurrency_limit": limit}
        ((kind, wanted),) = question.items()
        assert path == f"api/{kind}/count"
        return max(0, len(wanted["name"]["any_"]) - lost)

    return ask


@pytest.mark.parametrize(
    ("answers", "lacking"),
    [
        (server(), []),
        (server(lost=1), [f"{ALL - 1} of {ALL} deployments", "2 of 3 automations"]),
        (server(lost=99), [f"0 of {ALL} deployments", "0 of 3 automations"]),
        (server(limit=None), ["no limit of the queue gpu"]),
        (server(limit=4), []),  # a person has raised it
        (lambda *_: None, [f"0 of {ALL} deployments", "0 of 3 automations", "no limit of the queue gpu"]),
    ],
)
def test_what_the_server_lacks_is_named_and_it_counts_as_unconfigured(
    provisioned: Layout, monkeypatch: pytest.MonkeyPatch, answers: Callable[..., Any], lacking: list[str]
) -> None:
    monkeypatch.setattr(provision, "ask", answers)
    assert provision.missing(provisioned) == lacking
    assert provision.is_configured(provisioned) == (not lacking)
