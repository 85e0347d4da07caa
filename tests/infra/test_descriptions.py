"""prefect.yaml and automations.yaml against the flows and against Prefect's own types."""

from __future__ import annotations

import importlib
import json
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
import yaml
from prefect.server.utilities.user_templates import render_user_template_sync
from prefect.utilities.callables import parameter_schema

from infra.services.automations import CHANNELS, Channel, addresses, read_automations, resolve_ids
from infra.services.layout import CODE, POOL, QUEUE
from rlcore.errors import ConfigError
from rlcore.tasks.pipeline import events
from rlcore.tasks.pipeline.reconciliation import HEAL

DEPLOYMENTS = yaml.safe_load((CODE / "infra" / "prefect.yaml").read_text())["deployments"]
AUTOMATIONS = read_automations()
BLOCKS = [channel.block for channel in CHANNELS]
IDS = {name: UUID(int=number) for number, name in enumerate(("retrain/retrain", *BLOCKS), 1)}
TELLS = "the team is told"


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
    computes = deployment["name"] not in ("rollback", "gc", "backup", "approve", "reject")
    assert (pool["name"], pool.get("work_queue_name")) == (POOL, QUEUE if computes else None)


def test_every_flow_has_a_deployment() -> None:
    deployed = {each["entrypoint"].partition(":")[0] for each in DEPLOYMENTS}
    flows = {str(path.relative_to(CODE)) for path in (CODE / "flows").glob("*.py") if "@flow(" in path.read_text()}
    assert flows == deployed


@pytest.mark.parametrize("automation", AUTOMATIONS, ids=lambda each: each["name"])
def test_prefect_takes_an_automation(automation: dict[str, Any]) -> None:
    made = resolve_ids(automation, IDS)
    assert made is not None
    assert made.enabled
    assert automation["description"]


def test_names_of_a_deployment_and_of_blocks_become_their_ids() -> None:
    filled = {each["name"]: resolve_ids(each, IDS) for each in AUTOMATIONS}
    (retraining,) = filled["a new snapshot of preferences starts retrain"].actions  # type: ignore[union-attr]
    assert retraining.deployment_id == UUID(int=1)  # type: ignore[union-attr]
    telling = filled[TELLS].actions  # type: ignore[union-attr]
    assert [each.block_document_id for each in telling] == [IDS[name] for name in BLOCKS]  # type: ignore[union-attr]
    names = {f"{flow_name(each)}/{each['name']}" for each in DEPLOYMENTS}
    used = {action["deployment_id"] for each in AUTOMATIONS for action in each["actions"] if "deployment_id" in action}
    assert used <= names


@pytest.mark.parametrize("block", BLOCKS)
def test_people_are_told_where_an_address_is_set_and_nothing_else_changes(block: str) -> None:
    deployments = {name: number for name, number in IDS.items() if name not in BLOCKS}
    left_out = [each["name"] for each in AUTOMATIONS if resolve_ids(each, deployments) is None]
    assert left_out == [TELLS]
    (telling,) = (each for each in AUTOMATIONS if each["name"] == TELLS)
    made = resolve_ids(telling, deployments | {block: IDS[block]})
    assert [each.block_document_id for each in made.actions] == [IDS[block]]  # type: ignore[union-attr]


def test_automations_expect_the_events_that_tasks_announce() -> None:
    expected = {name for each in AUTOMATIONS for name in each["trigger"]["expect"] if name.startswith("rlcore.")}
    assert expected >= {events.SNAPSHOT, events.NOT_STARTED, events.FAILED, events.BUDGET, events.MISSED}
    tags = {tag for each in DEPLOYMENTS for tag in each["tags"]}
    related = {each["trigger"].get("match_related", {}).get("prefect.resource.id", "") for each in AUTOMATIONS}
    assert {tag.removeprefix("prefect.tag.") for tag in related - {""}} <= tags


def rendered(field: str, block: str, event: str) -> str:
    """Return the text that Prefect makes of the template of an action for an event."""
    (telling,) = (each for each in AUTOMATIONS if each["name"] == TELLS)
    (action,) = (each for each in telling["actions"] if each["block_document_id"] == block)
    payload = {"text": 'it "awaits"\n<you> – now', "run": "promote tiny", "url": "http://here/runs/1"}
    resource = SimpleNamespace(name="tiny-grpo version 4")
    context = {"event": SimpleNamespace(event=event, resource=resource, payload=payload)}
    return render_user_template_sync(action[field], context)


(TOLD,) = (each["trigger"]["expect"] for each in AUTOMATIONS if each["name"] == TELLS)


@pytest.mark.parametrize("event", TOLD)
def test_the_message_of_every_event_is_whole_on_each_channel(event: str) -> None:
    text = 'tiny-grpo version 4: it "awaits"\n<you> – now'
    told = json.loads(rendered("body", "rlcore-webhook", event))
    assert told == {"text": text, "event": event, "run": "promote tiny", "url": "http://here/runs/1"}
    assert json.loads(rendered("body", "rlcore-slack", event)) == {"text": f"{text} http://here/runs/1"}
    assert rendered("subject", "rlcore-mail", event) == f"tiny-grpo version 4: {event}"
    assert rendered("body", "rlcore-mail", event).endswith("now\n\npromote tiny http://here/runs/1")


@pytest.mark.parametrize("channel", CHANNELS, ids=lambda each: each.block)
def test_an_address_of_another_kind_is_refused_and_not_shown(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in CHANNELS:
        monkeypatch.delenv(each.variable, raising=False)
    assert addresses() == {}
    monkeypatch.setenv(channel.variable, f"{channel.schemes[0]}example.org/secret")
    assert addresses() == {channel.block: f"{channel.schemes[0]}example.org/secret"}
    monkeypatch.setenv(channel.variable, "hooks.example.org/secret")
    with pytest.raises(ConfigError, match="does not begin with") as caught:
        addresses()
    assert (caught.value.where, "secret" in str(caught.value)) == (channel.variable, False)
