"""What the servers are told: the queue's limit, the deployments, the automations. All of it can be repeated."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

from infra.services.automations import FILE, tell_automations, webhook_url
from infra.services.layout import CODE, POOL, QUEUE, Layout, environment
from rlcore.errors import ServiceError

_DEPLOYMENTS = CODE / "infra" / "prefect.yaml"
_GPU_RUNS = 1  # at a time: a second one would take its memory from the first


def told(layout: Layout) -> Path:
    """The file that holds the digest of what the servers were told last."""
    return layout.root / "provisioned"


def is_told(layout: Layout) -> bool:
    """Whether the servers know the deployments and automations as the files describe them now."""
    return told(layout).exists() and told(layout).read_text(encoding="utf-8") == _digest()


def provision(layout: Layout) -> None:
    """Tell the servers, from a process whose environment names them.

    Raises:
        ServiceError: they refuse, with the log that says why.
    """
    digest = _digest()
    log = layout.log("provision")
    with log.open("wb") as file:
        for command in (_prefect("deploy", "--all", "--prefect-file", str(_DEPLOYMENTS)), _ours()):
            done = subprocess.run(
                command, cwd=CODE, env=environment(layout, ""), stdout=file, stderr=subprocess.STDOUT, check=False
            )
            if done.returncode:
                raise ServiceError("the deployments or automations were refused", where=str(log), fix="read the log")
    told(layout).write_text(digest, encoding="utf-8")


def tell() -> None:
    """The queue's limit, the webhook and the automations, told to the server that ``PREFECT_API_URL`` names."""
    asyncio.run(_tell())


async def _tell() -> None:
    from prefect.client.orchestration import get_client

    async with get_client() as client:
        await _limit_queue(client)
        await tell_automations(client)


async def _limit_queue(client: Any) -> None:
    from prefect.exceptions import ObjectNotFound

    try:
        queue = await client.read_work_queue_by_name(QUEUE, work_pool_name=POOL)
    except ObjectNotFound:
        await client.create_work_queue(name=QUEUE, concurrency_limit=_GPU_RUNS, work_pool_name=POOL)
    else:
        await client.update_work_queue(queue.id, concurrency_limit=_GPU_RUNS)


def _digest() -> str:
    """Of everything that deployments and automations are made from."""
    files = [_DEPLOYMENTS, FILE, *sorted((CODE / "flows").rglob("*.py"))]
    presets = sorted(path.name for path in (CODE / "flows" / "presets").glob("*.toml"))
    content = b"".join(file.read_bytes() for file in files) + " ".join((*presets, webhook_url())).encode()
    return hashlib.sha256(content).hexdigest()


def _prefect(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "prefect", "--no-prompt", *arguments]


def _ours() -> list[str]:
    return [sys.executable, "-m", "infra.services", "tell"]
