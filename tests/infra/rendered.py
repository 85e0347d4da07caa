"""The Job that Prefect's own Kubernetes worker makes of the template, for one deployment under one overlay."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any
from uuid import UUID

import pytest

from tests.infra.documents import INFRA, kustomized, read

SECRETS = {  # as docs/operations.md makes them: their keys, and a value that no other text holds
    "rlcore-web": {
        "PREFECT_API_AUTH_STRING": "rlcore:planted-web",
        "MLFLOW_TRACKING_USERNAME": "rlcore",
        "MLFLOW_TRACKING_PASSWORD": "planted-web",
    },
    "rlcore-webhook": {
        "url": "https://planted-webhook",
        "slack": "https://planted-slack",
        "mail": "mailtos://planted-mail",
    },
}
DEPLOYMENTS: list[dict[str, Any]] = read("prefect.yaml")["deployments"]


def job_template(overlay: str) -> dict[str, Any]:
    """The work pool's template as ``infra/register.py`` makes it of an overlay."""
    sys.path.insert(0, str(INFRA))
    try:
        from register import job_template as make
    finally:
        sys.path.remove(str(INFRA))
    (runs,) = [each for each in kustomized(overlay) if each["kind"] == "ConfigMap" and "RUN_IMAGE" in each["data"]]
    made: dict[str, Any] = make(runs["data"])
    return made


def worker_environment(overlay: str) -> dict[str, str]:
    """Return the environment of the worker's container with planted secrets."""
    objects = kustomized(overlay)
    (worker,) = [each for each in objects if (each["kind"], each["metadata"]["name"]) == ("Deployment", "worker")]
    maps = {each["metadata"]["name"]: each["data"] for each in objects if each["kind"] == "ConfigMap"}
    (container,) = worker["spec"]["template"]["spec"]["containers"]
    found: dict[str, str] = {}
    for source in container["envFrom"]:
        found |= maps[source["configMapRef"]["name"]] if "configMapRef" in source else {}
        found |= SECRETS[source["secretRef"]["name"]] if "secretRef" in source else {}
    return found | {each["name"]: each.get("value", "planted") for each in container["env"]}


def render(
    overlay: str,
    deployment: Mapping[str, Any] = DEPLOYMENTS[0],
    values: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The Job of a run: by Prefect's worker, whose environment is ``environment``; ``values``: more job variables."""
    if importlib.util.find_spec("prefect_kubernetes") is None:
        pytest.skip("prefect-kubernetes is not installed (make setup)")
    from prefect.client.schemas.objects import Flow, FlowRun, WorkPool
    from prefect.client.schemas.responses import DeploymentResponse
    from prefect.settings import Settings
    from prefect.settings.context import get_current_settings
    from prefect_kubernetes.worker import KubernetesWorkerJobConfiguration

    pool = deployment["work_pool"]
    given = {**pool.get("job_variables", {}), **(values or {})}
    flow_name = deployment["entrypoint"].partition(":")[2].replace("_", "-")
    template = job_template(overlay)
    run = FlowRun(id=UUID(int=1), flow_id=UUID(int=2), deployment_id=UUID(int=3), name="a-run")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (environment or {}).items():
            patch.setenv(name, value)
        settings = Settings()
        assert settings is not get_current_settings()
        patch.setattr("prefect.workers.base.get_current_settings", lambda: settings)
        making = KubernetesWorkerJobConfiguration.from_template_and_values(template, given, client=nullcontext())
        configuration = asyncio.run(making)
        configuration.prepare_for_flow_run(
            run,
            deployment=DeploymentResponse(id=UUID(int=3), name=deployment["name"], flow_id=UUID(int=2)),
            flow=Flow(id=UUID(int=2), name=flow_name),
            work_pool=WorkPool(id=UUID(int=4), name=pool["name"], type="kubernetes"),
            worker_name="worker",
        )
    made: dict[str, Any] = configuration.job_manifest
    return made


def placeholders(value: Any) -> list[str]:
    """Variables of the template that were left in a rendered value."""
    return re.findall(r"{{.*?}}", str(value))
