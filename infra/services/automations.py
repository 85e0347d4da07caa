"""`infra/automations.yaml` for one server: what stands there by name, a deployment or the webhook, by its id."""

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
WEBHOOK = "RLCORE_WEBHOOK_URL"  # what a user sets: who is told of a failed gate or canary
BLOCK = "rlcore-webhook"  # Prefect keeps the address in it, encrypted
# What the file had while the server was to find dead runs: it calls living ones crashed.
_REPLACED = (
    "a run without heartbeat has crashed",
    "a crashed run goes on",
    "a run whose worker died before it began is queued again",
)


def webhook_url() -> str:
    """The address that ``RLCORE_WEBHOOK_URL`` names; empty: nobody is told.

    Raises:
        ConfigError: it is no address of a web page.
    """
    url = os.environ.get(WEBHOOK, "")
    if url and not url.startswith(("http://", "https://")):
        raise ConfigError(
            f"{url!r} is no web address", where=WEBHOOK, fix="set it to http://… or https://…, or unset it"
        )
    return url


def read_automations() -> list[dict[str, Any]]:
    """The file's automations as they stand there."""
    import yaml

    found: list[dict[str, Any]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return found


def resolve_ids(automation: Mapping[str, Any], ids: Mapping[str, UUID]) -> AutomationCore | None:
    """An automation with ids in place of names; None where it names something that this server has not.

    That is the webhook, while nobody has given its address.
    """
    from prefect.events.schemas.automations import AutomationCore

    actions = [dict(action) for action in automation["actions"]]
    for action in actions:
        for field in {"deployment_id", "block_document_id"} & action.keys():
            if action[field] not in ids:
                return None
            action[field] = ids[action[field]]
    return AutomationCore.model_validate({**automation, "actions": actions})


def promised() -> list[str]:
    """The names of the automations that a server has once it was told."""
    nobody = not webhook_url()
    return [each["name"] for each in read_automations() if not (nobody and "block_document_id" in each["actions"][0])]


async def sync_automations(client: PrefectClient) -> None:
    """Make the server's automations those of the file; one that lacks its webhook is taken away."""
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
