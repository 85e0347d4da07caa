"""The services' folder, ports, passwords and environments; nothing is started."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from infra.services.layout import (
    Layout,
    clients,
    environment,
    find_layout,
    passwords,
    save_layout,
    saved_layout,
    write_client_file,
)
from infra.services.table import SERVICES
from rlcore.errors import ConfigError, StorageError
from tests.architecture.source_files import ROOT


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
    said = subprocess.run(command, capture_output=True, text=True, env={}, check=True).stdout
    found = dict(line.split("=", 1) for line in said.splitlines())
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


def test_files_of_runs_go_where_the_user_has_said_and_into_the_folder_else(
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
