"""Configuration of the servers: deployments and their parameters, queue limit, schedule, automations.

It can be repeated: a schedule or limit that was changed on the server stays.
"""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

from infra.services.automations import FILE, read_automations, sync_automations
from infra.services.layout import CODE, POOL, QUEUE, Layout, environment
from infra.services.parameters import tell_parameters
from infra.services.table import ask
from rlcore.errors import ServiceError

_DEPLOYMENTS = CODE / "infra" / "prefect.yaml"
_GPU_RUNS = 1  # runs at a time: a second one would compete for memory
_READ = (".py", ".toml")  # sources of deployments and the names in their parameters
_SCHEDULES = {
    "retrain/retrain": ("nightly", "0 2 * * *"),
    "gc/gc": ("weekly", "0 4 * * 0"),
    "backup/backup": ("nightly", "0 5 * * *"),
}


def stamp_path(layout: Layout) -> Path:
    """Return the file with the digest of the last configuration."""
    return layout.root / "provisioned"


def is_configured(layout: Layout) -> bool:
    """Return True if the servers have the current deployments and automations of the files."""
    is_current = stamp_path(layout).exists() and stamp_path(layout).read_text(encoding="utf-8") == _digest()
    return is_current and not missing(layout)


def missing(layout: Layout) -> list[str]:
    """List the expected objects that the server lacks: its database may have been replaced."""
    rows = [
        ("deployments", len(known := _deployments()), {"deployments": {"name": {"any_": _names(known)}}}),
        ("automations", len(rules := _automations()), {"automations": {"name": {"any_": rules}}}),
    ]
    counts = [(name, wanted, ask(layout, "prefect", f"api/{name}/count", question)) for name, wanted, question in rows]
    lacking = [f"{found or 0} of {wanted} {name}" for name, wanted, found in counts if (found or 0) < wanted]
    queue = ask(layout, "prefect", f"api/work_pools/{POOL}/queues/{QUEUE}")
    return lacking if queue and queue["concurrency_limit"] else [*lacking, f"no limit of the queue {QUEUE}"]


def _automations() -> list[str]:
    return [each["name"] for each in read_automations()]


def _names(deployments: list[str]) -> list[str]:
    return [each.partition("/")[2] for each in deployments]


def provision(layout: Layout) -> None:
    """Configure the servers, in a process whose environment names them.

    Raises:
        ServiceError: they reject it; names the log.
    """
    digest = _digest()
    log = layout.log("provision")
    with log.open("wb") as file:
        deploy = _prefect("deploy", "--all", "--prefect-file", str(_DEPLOYMENTS))
        for command in (*_pool(layout), deploy, _tell_command()):
            done = subprocess.run(
                command, cwd=CODE, env=environment(layout, ""), stdout=file, stderr=subprocess.STDOUT, check=False
            )
            if done.returncode:
                raise ServiceError("the deployments or automations were rejected", where=str(log), fix="read the log")
    if lacking := missing(layout):
        raise ServiceError(
            f"after configuration, the server has {', '.join(lacking)}", where=str(log), fix="read the log"
        )
    stamp_path(layout).write_text(digest, encoding="utf-8")


def configure_servers() -> None:
    """Configure all but the deployments themselves on the server that ``PREFECT_API_URL`` names."""
    asyncio.run(_tell())


async def _tell() -> None:
    from prefect.client.orchestration import get_client

    async with get_client() as client:
        await _limit_queue(client)
        await tell_parameters(client, _deployments())
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
    """Add schedules, paused until the user enables them. Existing ones are the user's and stay."""
    from prefect.client.schemas.schedules import CronSchedule

    for name, (slug, times) in _SCHEDULES.items():
        deployment = await client.read_deployment_by_name(name)
        if not deployment.schedules:
            schedule = CronSchedule(cron=times, timezone="UTC")
            await client.create_deployment_schedules(deployment.id, [(schedule, False)], slug=slug)


def _deployments() -> list[str]:
    """Return the names of all deployments, as ``flow/name``; a flow is named as its function."""
    import yaml

    each = yaml.safe_load(_DEPLOYMENTS.read_text(encoding="utf-8"))["deployments"]
    return [f"{one['entrypoint'].partition(':')[2].replace('_', '-')}/{one['name']}" for one in each]


def _digest() -> str:
    """Return the digest of all sources of deployments and automations."""
    files = [_DEPLOYMENTS, FILE, *sorted(path for path in (CODE / "flows").rglob("*.*") if path.suffix in _READ)]
    names = " ".join(path.name for path in files)
    content = b"".join(file.read_bytes() for file in files) + names.encode()
    return hashlib.sha256(content).hexdigest()


def _prefect(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "prefect", "--no-prompt", *arguments]


def _pool(layout: Layout) -> list[list[str]]:
    is_there = ask(layout, "prefect", f"api/work_pools/{POOL}") is not None
    return [] if is_there else [_prefect("work-pool", "create", POOL, "--type", "process")]


def _tell_command() -> list[str]:
    return [sys.executable, "-m", "infra.services", "tell"]
