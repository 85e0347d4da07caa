"""Automations of ``infra/automations.yaml`` on a server, with ids for the names of deployments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from uuid import UUID

from infra.services.layout import CODE

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient
    from prefect.events.schemas.automations import Automation, AutomationCore

FILE = CODE / "infra" / "automations.yaml"
_DEPLOYMENT = "deployment_id"
# Automations of an earlier version. Prefect's own search for dead runs marks living ones as crashed.
_REPLACED = (
    "a run without heartbeat has crashed",
    "a crashed run goes on",
    "a run whose worker died before it began is queued again",
    "a failed gate or canary calls the webhook",
    "the team is told",
)


def read_automations() -> list[dict[str, Any]]:
    """Return the file's automations."""
    import yaml

    found: list[dict[str, Any]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return found


def resolve_ids(automation: Mapping[str, Any], ids: Mapping[str, UUID]) -> AutomationCore:
    """Replace names of deployments in an automation by ids."""
    from prefect.events.schemas.automations import AutomationCore

    actions = [
        {**action, _DEPLOYMENT: ids[action[_DEPLOYMENT]]} if _DEPLOYMENT in action else action
        for action in automation["actions"]
    ]
    return AutomationCore.model_validate({**automation, "actions": actions})


async def sync_automations(client: PrefectClient) -> None:
    """Synchronize the server's automations with the file."""
    wanted = read_automations()
    ids = await _deployments(client, wanted)
    for name in _REPLACED:
        await _delete(client, await client.read_automations_by_name(name))
    for each in wanted:
        automation, known = resolve_ids(each, ids), await client.read_automations_by_name(each["name"])
        if known:
            await client.update_automation(known[0].id, automation)
        else:
            await client.create_automation(automation)


async def _delete(client: PrefectClient, automations: list[Automation]) -> None:
    for each in automations:
        await client.delete_automation(each.id)


async def _deployments(client: PrefectClient, automations: list[dict[str, Any]]) -> dict[str, UUID]:
    actions = [action for each in automations for action in each["actions"]]
    names = {action[_DEPLOYMENT] for action in actions if _DEPLOYMENT in action}
    return {name: (await client.read_deployment_by_name(name)).id for name in names}
