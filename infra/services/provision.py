"""Configuration of the servers: their deployments, queue limit, schedules and automations.

It can be repeated: a schedule or limit that was changed on the server stays.
"""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from infra.services.deployments import (
    AUTOMATIONS,
    DEPLOYMENT_ID,
    DEPLOYMENTS,
    closed,
    names_by_preset,
    names_of,
    read_yaml,
    resolve_ids,
    with_form,
    write_deployments,
)
from infra.services.layout import CODE, POOL, QUEUE, Layout, environment
from infra.services.table import ask
from rlcore.errors import ServiceError

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient

SOURCES = (
    *(AUTOMATIONS, DEPLOYMENTS, Path(__file__), Path(__file__).with_name("deployments.py")),
    *(CODE / "rlcore" / name for name in ("algorithms/table.py", "config/rl.py")),
)
_GPU_RUNS = 1  # runs at a time: a second one would compete for memory
_READ = (".py", ".toml")  # sources of deployments and the names in their parameters
_SCHEDULES = {
    "retrain/retrain": ("nightly", "0 2 * * *"),
    "gc/gc": ("weekly", "0 4 * * 0"),
    "dump/dump": ("nightly", "0 5 * * *"),
}


def stamp_path(layout: Layout) -> Path:
    """Return the file with the digest of the last configuration."""
    return layout.root / "provisioned"


def _file(layout: Layout) -> Path:
    return layout.root / "deployments.yaml"


def is_configured(layout: Layout) -> bool:
    """Return True if the servers have the files' deployments and automations."""
    is_current = stamp_path(layout).exists() and stamp_path(layout).read_text(encoding="utf-8") == _digest()
    return is_current and not missing(layout)


def missing(layout: Layout) -> list[str]:
    """List the expected objects that the server lacks: its database may have been replaced."""
    if not _file(layout).exists():
        return ["no deployments"]
    names = [each.partition("/")[2] for each in names_of(_file(layout))]
    rules = [each["name"] for each in read_yaml(AUTOMATIONS)]
    counts = [
        (name, len(wanted), ask(layout, "prefect", f"api/{name}/count", {name: {"name": {"any_": wanted}}}))
        for name, wanted in (("deployments", names), ("automations", rules))
    ]
    lacking = [f"{found or 0} of {wanted} {name}" for name, wanted, found in counts if (found or 0) < wanted]
    queue = ask(layout, "prefect", f"api/work_pools/{POOL}/queues/{QUEUE}")
    return lacking if queue and queue["concurrency_limit"] else [*lacking, f"no limit of the queue {QUEUE}"]


def provision(layout: Layout) -> None:
    """Configure the servers, in a process whose environment names them.

    Raises:
        ServiceError: they reject it; names the log.
    """
    digest = _digest()
    log = layout.log("provision")
    with log.open("wb") as file:
        write_deployments(_file(layout))
        command, variables = [sys.executable, "-m", "infra.services", "tell"], environment(layout, "")
        done = subprocess.run(command, cwd=CODE, env=variables, stdout=file, stderr=subprocess.STDOUT, check=False)
        if done.returncode:
            raise ServiceError("the deployments or automations were rejected", where=str(log), fix="read the log")
    if lacking := missing(layout):
        raise ServiceError(
            f"after configuration, the server has {', '.join(lacking)}", where=str(log), fix="read the log"
        )
    stamp_path(layout).write_text(digest, encoding="utf-8")


def configure_servers() -> None:
    """Configure the server that ``PREFECT_API_URL`` names. An existing work pool is not changed.

    Raises:
        ServiceError: it rejects the pool or a deployment.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "deployments.yaml"
        write_deployments(file)
        prefect = [sys.executable, "-m", "prefect", "--no-prompt"]
        for command in (*_pool(), ["deploy", "--all", "--prefect-file", str(file)]):
            if subprocess.run([*prefect, *command], cwd=CODE, check=False).returncode:
                raise ServiceError(f"prefect {command[0]} failed", fix="read what Prefect says above")
        asyncio.run(_tell(names_of(file)))


async def _tell(deployments: list[str]) -> None:
    from prefect.client.orchestration import get_client

    async with get_client() as client:
        await _limit_queue(client)
        await tell_parameters(client, deployments)
        await _offer_schedules(client)
        await sync_automations(client)


async def _limit_queue(client: Any) -> None:
    from prefect.exceptions import ObjectNotFound

    try:
        queue = await client.read_work_queue_by_name(QUEUE, work_pool_name=POOL)
    except ObjectNotFound:
        await client.create_work_queue(name=QUEUE, concurrency_limit=_GPU_RUNS, work_pool_name=POOL)
    else:
        if queue.concurrency_limit is None:  # another limit was set by the user
            await client.update_work_queue(queue.id, concurrency_limit=_GPU_RUNS)


async def _offer_schedules(client: Any) -> None:
    """Add paused schedules; existing ones are the user's and stay."""
    from prefect.client.schemas.schedules import CronSchedule

    for name, (slug, times) in _SCHEDULES.items():
        deployment = await client.read_deployment_by_name(name)
        if not deployment.schedules:
            schedule = CronSchedule(cron=times, timezone="UTC")
            await client.create_deployment_schedules(deployment.id, [(schedule, False)], slug=slug)


def _digest() -> str:
    files = [*SOURCES, *sorted(path for path in (CODE / "flows").rglob("*.*") if path.suffix in _READ)]
    names = " ".join(path.name for path in files)
    content = b"".join(file.read_bytes() for file in files) + names.encode()
    return hashlib.sha256(content).hexdigest()


def _pool() -> list[list[str]]:
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound

    with get_client(sync_client=True) as client:
        try:
            client.read_work_pool(POOL)
        except ObjectNotFound:
            return [["work-pool", "create", POOL, "--type", "process"]]
    return []


async def tell_parameters(client: PrefectClient, deployments: Iterable[str]) -> None:
    """Close the schemas of these deployments (``flow/name``), and give those of algorithms their form."""
    from prefect.client.schemas.actions import DeploymentUpdate

    names = names_by_preset()
    for deployment in deployments:
        known = await client.read_deployment_by_name(deployment)
        schema = closed(known.parameter_openapi_schema or {}, names)
        if algorithm := known.parameters.get("algorithm"):
            schema = with_form(schema, algorithm)
        await client.update_deployment(known.id, DeploymentUpdate(parameter_openapi_schema=schema))


# Automations of an earlier version. Prefect's own search for dead runs marks living ones as crashed.
_REPLACED = (
    "a run without heartbeat has crashed",
    "a crashed run goes on",
    "a run whose worker died before it began is queued again",
    "a failed gate or canary calls the webhook",
    "the team is told",
)


async def sync_automations(client: PrefectClient) -> None:
    """Synchronize the server's automations with the file."""
    wanted = read_yaml(AUTOMATIONS)
    ids = await _deployments(client, wanted)
    for name in _REPLACED:
        for old in await client.read_automations_by_name(name):
            await client.delete_automation(old.id)
    for each in wanted:
        automation, known = resolve_ids(each, ids), await client.read_automations_by_name(each["name"])
        if known:
            await client.update_automation(known[0].id, automation)
        else:
            await client.create_automation(automation)


async def _deployments(client: PrefectClient, automations: list[dict[str, Any]]) -> dict[str, UUID]:
    actions = [action for each in automations for action in each["actions"]]
    names = {action[DEPLOYMENT_ID] for action in actions if DEPLOYMENT_ID in action}
    return {name: (await client.read_deployment_by_name(name)).id for name in names}
