"""prefect.yaml and automations.yaml against the flows and against Prefect's own types."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import yaml
from prefect.events.schemas.automations import AutomationCore
from prefect.utilities.callables import parameter_schema

from infra.services.layout import CODE, POOL, QUEUE

DEPLOYMENTS = yaml.safe_load((CODE / "infra" / "prefect.yaml").read_text())["deployments"]
AUTOMATIONS = yaml.safe_load((CODE / "infra" / "automations.yaml").read_text())


def schema_of(deployment: dict[str, Any]) -> dict[str, Any]:
    path, _, name = deployment["entrypoint"].partition(":")
    flow = getattr(importlib.import_module(path.removesuffix(".py").replace("/", ".")), name)
    found: dict[str, Any] = parameter_schema(flow).model_dump()
    return found


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda each: each["name"])
def test_a_deployment_describes_itself_and_every_parameter(deployment: dict[str, Any]) -> None:
    fields = schema_of(deployment)["properties"]
    assert deployment["description"]
    assert set(deployment.get("parameters", {})) <= set(fields)
    assert all(each.get("description") for each in fields.values()), fields


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda each: each["name"])
def test_a_deployment_can_be_healed_ends_in_time_and_shares_the_gpu(deployment: dict[str, Any]) -> None:
    tags, pool = set(deployment["tags"]), deployment["work_pool"]
    assert "heal" in tags
    assert len(tags & {"within-6h", "within-7d"}) == 1
    computes = deployment["name"] != "rollback"
    assert (pool["name"], pool.get("work_queue_name")) == (POOL, QUEUE if computes else None)


def test_every_flow_has_a_deployment() -> None:
    deployed = {each["entrypoint"].partition(":")[0] for each in DEPLOYMENTS}
    flows = {str(path.relative_to(CODE)) for path in (CODE / "flows").glob("*.py") if "@flow(" in path.read_text()}
    assert flows == deployed


@pytest.mark.parametrize("automation", AUTOMATIONS, ids=lambda each: each["name"])
def test_prefect_takes_an_automation(automation: dict[str, Any]) -> None:
    assert AutomationCore.model_validate(automation).enabled


def test_a_crashed_run_is_put_back_three_times_and_not_before_it_began() -> None:
    (rule,) = [each for each in AUTOMATIONS if each["trigger"]["expect"] == ["prefect.flow-run.Crashed"]]
    assert rule["trigger"]["match"]["prefect.run-count"] == ["1", "2", "3"]
