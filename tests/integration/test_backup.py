"""A home with its servers, backed up by a deployment, deleted, restored: databases, files and schedules are back."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.integration.service_runs import Services, running_services

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


def test_servers_that_are_lost_with_their_home_come_back_from_a_backup(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with running_services() as services:
        run = services.python(LOG, served=True).splitlines()[-1]
        activate(services)
        (backup,) = services.ask("prefect", "api/deployments/name/backup/backup")["schedules"]
        assert backup["active"] is False
        done = services.deploy("backup/backup", target=str(target))
        assert done.returncode == 0, done.stdout + done.stderr
        assert services.command("down").returncode == 0
        secrets = services.clients["MLFLOW_TRACKING_PASSWORD"]
        shutil.rmtree(services.home)
        restored = services.rlcore("restore", str(target))
        assert restored.returncode == 0, restored.stderr
        assert "`make services` loads the databases" in restored.stdout
        up = services.command("up")
        assert up.returncode == 0, up.stdout + up.stderr
        assert services.steps(run) == [3]
        files = services.ask("mlflow", f"api/2.0/mlflow/artifacts/list?run_id={run}")["files"]
        assert [each["path"] for each in files] == ["note.txt"]
        (nightly,) = services.ask("prefect", "api/deployments/name/retrain/retrain")["schedules"]
        assert nightly["active"] is True
        assert services.clients["MLFLOW_TRACKING_PASSWORD"] != secrets
