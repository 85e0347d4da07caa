"""Automations of ``infra/automations.yaml`` on a server, with ids for the names of deployments and blocks."""

from __future__ import annotations

import os
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from infra.services.layout import CODE
from rlcore.errors import ConfigError

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient
    from prefect.events.schemas.automations import Automation, AutomationCore

FILE = CODE / "infra" / "automations.yaml"
_BLOCK = "block_document_id"
_WEB, _MAIL = ("http://", "https://"), ("mailto://", "mailtos://")
# Automations of an earlier version. Prefect's own search for dead runs marks living ones as crashed.
_REPLACED = (
    "a run without heartbeat has crashed",
    "a crashed run goes on",
    "a run whose worker died before it began is queued again",
    "a failed gate or canary calls the webhook",
)


@dataclass(frozen=True, kw_only=True)
class Channel:
    """Way to tell people: the variable with its address, which the user sets, and the Prefect block that keeps it.

    Prefect stores the address encrypted.
    """

    variable: str
    block: str
    schemes: tuple[str, ...]

    @property
    def address(self) -> str:
        """The address; empty if nobody is told this way.

        Raises:
            ConfigError: it is of another kind.
        """
        address = os.environ.get(self.variable, "")
        if address and not address.startswith(self.schemes):
            raise ConfigError(
                f"the address does not begin with {' or '.join(self.schemes)}",
                where=self.variable,
                fix="correct it, or unset it",
            )
        return address


CHANNELS = (
    Channel(variable="RLCORE_WEBHOOK_URL", block="rlcore-webhook", schemes=_WEB),
    Channel(variable="RLCORE_SLACK_URL", block="rlcore-slack", schemes=_WEB),
    Channel(variable="RLCORE_MAIL_URL", block="rlcore-mail", schemes=_MAIL),
)


def addresses() -> dict[str, str]:
    """Return the addresses that are set, by their blocks.

    Raises:
        ConfigError: one is of another kind than its block takes.
    """
    return {each.block: each.address for each in CHANNELS if each.address}


def read_automations() -> list[dict[str, Any]]:
    """Return the file's automations."""
    import yaml

    found: list[dict[str, Any]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return found


def resolve_ids(automation: Mapping[str, Any], ids: Mapping[str, UUID]) -> AutomationCore | None:
    """Replace names in an automation by ids, without actions that name an unset block; None if no action is left."""
    from prefect.events.schemas.automations import AutomationCore

    actions = [dict(action) for action in _actions(automation, ids)]
    for action in actions:
        for field in {"deployment_id", _BLOCK} & action.keys():
            action[field] = ids[action[field]]
    return AutomationCore.model_validate({**automation, "actions": actions}) if actions else None


def promised() -> list[str]:
    """Return the names of the automations that a configured server has."""
    known = addresses()
    return [each["name"] for each in read_automations() if _actions(each, known)]


def _actions(automation: Mapping[str, Any], blocks: Container[str]) -> list[Mapping[str, Any]]:
    return [action for action in automation["actions"] if _BLOCK not in action or action[_BLOCK] in blocks]


async def sync_automations(client: PrefectClient) -> None:
    """Synchronize the server's automations with the file; remove those that have nobody to tell."""
    wanted = read_automations()
    ids = await _deployments(client, wanted) | await _blocks()
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


async def _blocks() -> dict[str, UUID]:
    """Save the addresses as blocks of the server; return their ids."""
    from prefect.blocks.notifications import CustomWebhookNotificationBlock, SlackWebhook
    from prefect.types import SecretDict
    from pydantic import SecretStr

    found = dict[str, UUID]()
    for name, address in addresses().items():
        if address.startswith(_MAIL):  # Prefect has no block for SMTP; that of Slack hands any address on to Apprise
            found[name] = await SlackWebhook(url=SecretStr(address)).asave(name, overwrite=True)
            continue
        # Not the action `call-webhook`: its calls share one pool of connections, which the first to end closes.
        block = CustomWebhookNotificationBlock(
            name=name,
            url="{{ address }}",
            form_data="{{ body }}",
            headers={"Content-Type": "application/json"},
            cookies=None,
            secrets=SecretDict({"address": address}),
        )
        found[name] = await block.asave(name, overwrite=True)
    return found
