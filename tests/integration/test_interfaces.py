"""`rlcore ui` for real: both servers over a home, asked as a foreign page in a browser would, and as their user."""

from __future__ import annotations

import base64
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlcore.tasks.store.settings import Home
from tests.integration.browser import REFUSALS, refusals
from tests.integration.service_runs import ROOT, free_ports, wait_until
from tests.waiting import LONG

pytestmark = pytest.mark.services


@pytest.fixture(scope="module")
def ports() -> dict[str, int]:
    return free_ports(("prefect", "mlflow"))


@pytest.fixture(scope="module")
def let_in(
    ports: dict[str, int], _empty_mlflow_database: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """The header of the user whom the command's output names, while both servers run."""
    home = Home(tmp_path_factory.mktemp("home"))
    (home.root / "mlflow.db").write_bytes(_empty_mlflow_database.read_bytes())
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    options = ["--prefect-port", str(ports["prefect"]), "--mlflow-port", str(ports["mlflow"])]
    log = home.root / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "rlcore.flows", "ui", *options],
            env=kept | {"RLCORE_HOME": str(home.root), "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(lambda: "user rlcore, password" in log.read_text(), seconds=LONG, what="started")
        found = re.search(r"user (\w+), password ([\w-]+)", log.read_text())
        assert found is not None
        header = {"Authorization": f"Basic {base64.b64encode(':'.join(found.groups()).encode()).decode()}"}
        for name, port in ports.items():
            wait_until(lambda port=port: refusals(port, header)["the user"][0] == 200, seconds=LONG, what=name)
        yield header
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(LONG) == 0, log.read_text()


@pytest.mark.parametrize("server", ["prefect", "mlflow"])
def test_a_page_in_a_browser_is_refused(
    ports: dict[str, int], let_in: dict[str, str], server: str, record_property: Callable[[str, object], None]
) -> None:
    record_property("hostile", len(REFUSALS[server]) - 1)
    record_property("sound", 1)  # its user
    assert refusals(ports[server], let_in) == REFUSALS[server]
