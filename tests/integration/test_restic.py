"""A home with its servers, dumped by a deployment, backed up by restic, deleted, restored: everything is back."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.integration.service_runs import Services, running_services
from tests.restic import page

pytestmark = pytest.mark.services

LOG = """
import mlflow
with mlflow.start_run(run_name="kept") as run:
    mlflow.log_metric("reward/mean", 1.0, step=3)
    mlflow.log_text("whole", "note.txt")
print(run.info.run_id)
"""


def activate(services: Services) -> None:
    retrain = services.ask("prefect", "api/deployments/name/retrain/retrain")
    (nightly,) = retrain["schedules"]
    services.change("prefect", f"api/deployments/{retrain['id']}/schedules/{nightly['id']}", {"active": True})


def test_servers_that_are_lost_with_their_home_come_back(tmp_path: Path) -> None:
    with running_services() as services:
        commands = page(tmp_path, services.variables)
        commands.begin(services.home)
        run = services.python(LOG, served=True).splitlines()[-1]
        activate(services)
        (dump,) = services.ask("prefect", "api/deployments/name/dump/dump")["schedules"]
        assert dump["active"] is False
        done = services.deploy("dump/dump")
        assert done.returncode == 0, done.stdout + done.stderr
        (made,) = (services.home / "dumps").glob("[0-9]*")
        assert {"mlflow.dump", "prefect.dump"} <= {path.name for path in made.iterdir()}
        commands.back_up(services.home)
        assert services.command("down").returncode == 0
        secrets = services.clients["MLFLOW_TRACKING_PASSWORD"]
        shutil.rmtree(services.home)
        restored = commands.restore(services.home)
        assert "`make services` loads mlflow.dump, prefect.dump" in restored
        assert not (services.root / "passwords.json").exists()
        up = services.command("up")
        assert up.returncode == 0, up.stdout + up.stderr
        assert services.steps(run) == [3]
        files = services.ask("mlflow", f"api/2.0/mlflow/artifacts/list?run_id={run}")["files"]
        assert [each["path"] for each in files] == ["note.txt"]
        (nightly,) = services.ask("prefect", "api/deployments/name/retrain/retrain")["schedules"]
        assert nightly["active"] is True
        assert services.clients["MLFLOW_TRACKING_PASSWORD"] != secrets
