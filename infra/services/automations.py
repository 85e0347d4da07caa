"""Automations of ``infra/automations.yaml`` on a server, with ids for the names of deployments and webhook."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from uuid import UUID

from infra.services.layout import CODE
from rlcore.errors import ConfigError

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient
    from prefect.events.schemas.automations import Automation, AutomationCore

FILE = CODE / "infra" / "automations.yaml"
WEBHOOK = "RLCORE_WEBHOOK_URL"  # set by the user: address of the webhook for failures
BLOCK = "rlcore-webhook"  # Prefect stores the address in it, encrypted
# Automations of an earlier version: Prefect's own search for dead runs marks living ones as crashed.
_REPLACED = (
    "a run without heartbeat has crashed",
    "a crashed run goes on",
    "a run whose worker died before it began is queued again",
)


def webhook_url() -> str:
    """Return ``RLCORE_WEBHOOK_URL``; empty if there is no webhook.

    Raises:
        ConfigError: it is no web address.
    """
    url = os.environ.get(WEBHOOK, "")
    if url and not url.startswith(("http://", "https://")):
        raise ConfigError(
            f"{url!r} is no web address", where=WEBHOOK, fix="set it to http://… or https://…, or unset it"
        )
    return url


def read_automations() -> list[dict[str, Any]]:
    """Return the file's automations."""
    import yaml

    found: list[dict[str, Any]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return found


def resolve_ids(automation: Mapping[str, Any], ids: Mapping[str, UUID]) -> AutomationCore | None:
    """Replace names in an automation by ids; None if the server lacks a named object, such as an unset webhook."""
    from prefect.events.schemas.automations import AutomationCore

    actions = [dict(action) for action in automation["actions"]]
    for action in actions:
        for field in {"deployment_id", "block_document_id"} & action.keys():
            if action[field] not in ids:
                return None
            action[field] = ids[action[field]]
    return AutomationCore.model_validate({**automation, "actions": actions})


def promised() -> list[str]:
    """Return the names of the automations that a configured server has."""
    nobody = not webhook_url()
    return [each["name"] for each in read_automations() if not (nobody and "block_document_id" in each["actions"][0])]


async def sync_automations(client: PrefectClient) -> None:
    """Synchronize the server's automations with the file; remove those whose webhook is not set."""
    wanted = read_automations()
    ids = await _deployments(client, wanted) | await _webhook()
    for name in _REPLACED:
        await _delete(client, await client.read_automations_by_name(name))
    for each in wanted:
        automation, known = resolve_ids(each, ids), await client.read_automations_by_name(each["name"])
        if automation is None:
            await _delete(client, known)
        elif known:
            await client.update_automation(known[0].id, automation)
        else:
            await client.create_automation(automation)


async def _delete(client: PrefectClient, automations: list[Automation]) -> None:
    for each in automations:
        await client.delete_automation(each.id)


async def _deployments(client: PrefectClient, automations: list[dict[str, Any]]) -> dict[str, UUID]:
    actions = [action for each in automations for action in each["actions"]]
    names = {action["deployment_id"] for action in actions if "deployment_id" in action}
    return {name: (await client.read_deployment_by_name(name)).id for name in names}


async def _webhook() -> dict[str, UUID]:
    url = webhook_url()
    if not url:
        return {}
    from prefect.blocks.webhook import Webhook
    from prefect.types import SecretDict
    from pydantic import SecretStr

    block = Webhook(url=SecretStr(url), headers=SecretDict({"Content-Type": "application/json"}))
    return {BLOCK: await block.asave(BLOCK, overwrite=True)}
