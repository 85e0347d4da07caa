"""prefect.yaml and automations.yaml against the flows and against Prefect's own types."""

from __future__ import annotations

import importlib
from typing import Any
from uuid import UUID

import pytest
from prefect.utilities.callables import parameter_schema

from infra.services.automations import read_automations, resolve_ids
from infra.services.deployments import all_deployments
from infra.services.layout import CODE, POOL, QUEUE
from rlcore.tasks.run.reconciliation import HEAL

DEPLOYMENTS = all_deployments()
AUTOMATIONS = read_automations()
IDS = {"retrain/retrain": UUID(int=1)}


def flow_name(deployment: dict[str, Any]) -> str:
    """The name of a deployment's flow: that of its file, as Prefect writes it."""
    return str(deployment["entrypoint"].partition(":")[2].replace("_", "-"))


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
    assert HEAL in tags
    assert len(tags & {"within-6h", "within-7d"}) == 1
    computes = deployment["name"] not in ("rollback", "gc", "dump", "approve", "reject")
    assert (pool["name"], pool.get("work_queue_name")) == (POOL, QUEUE if computes else None)


def test_every_flow_has_a_deployment() -> None:
    deployed = {each["entrypoint"].partition(":")[0] for each in DEPLOYMENTS}
    flows = {str(path.relative_to(CODE)) for path in (CODE / "flows").glob("*.py") if "@flow(" in path.read_text()}
    assert flows == deployed


@pytest.mark.parametrize("automation", AUTOMATIONS, ids=lambda each: each["name"])
def test_prefect_takes_an_automation(automation: dict[str, Any]) -> None:
    assert resolve_ids(automation, IDS).enabled
    assert automation["description"]


def test_the_name_of_a_deployment_becomes_its_id() -> None:
    filled = {each["name"]: resolve_ids(each, IDS) for each in AUTOMATIONS}
    (retraining,) = filled["a new snapshot of preferences starts retrain"].actions
    assert retraining.deployment_id == UUID(int=1)  # type: ignore[union-attr]
    names = {f"{flow_name(each)}/{each['name']}" for each in DEPLOYMENTS}
    used = {action["deployment_id"] for each in AUTOMATIONS for action in each["actions"] if "deployment_id" in action}
    assert used <= names


def test_automations_select_runs_by_tags_that_deployments_have() -> None:
    tags = {tag for each in DEPLOYMENTS for tag in each["tags"]}
    related = {each["trigger"].get("match_related", {}).get("prefect.resource.id", "") for each in AUTOMATIONS}
    assert {tag.removeprefix("prefect.tag.") for tag in related - {""}} <= tags
