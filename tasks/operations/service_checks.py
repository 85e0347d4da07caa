"""Health of an installation with servers, line by line with a fix: ``rlcore doctor --services``."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any

import httpx

from rlcore.errors import RlcoreError, ServiceError
from rlcore.extras import make_command
from rlcore.tasks.store import doctor
from rlcore.tasks.store.doctor import DoctorCheck
from rlcore.tasks.store.dumps import newest_dump
from rlcore.tasks.store.settings import Home

_SECONDS = 10.0  # seconds within which a server must answer
_SILENT_SECONDS = 90.0  # a worker sends a heartbeat every 30 s
_DUMP_DAYS = 8.0
_PREFECT = "PREFECT_API_URL"


def check_services(home: Home) -> Iterator[DoctorCheck]:
    """Yield the results of all checks; without the address of a server the only one, which says how to get it."""
    if not os.environ.get(_PREFECT, "").startswith("http"):
        start = make_command("services") or "start the servers"
        fix = f"{start}, then: source {home.root / 'services' / 'clients.env'}"
        yield DoctorCheck(subject="servers", state="missing", text=f"{_PREFECT} names none", fix=fix)
        return
    checks: dict[str, Callable[[], DoctorCheck]] = {
        "Prefect server": partial(doctor.server, "Prefect", _PREFECT, ""),
        "MLflow server": partial(doctor.server, "MLflow", "MLFLOW_TRACKING_URI", "embedded"),
        "worker": worker,
        "scheduler": scheduler,
        "deployments": deployments,
        "dump": partial(dump, home),
        "disk": partial(doctor.disk, home),
    }
    for subject, check in checks.items():
        try:
            yield check()
        except (RlcoreError, OSError) as error:
            fix = error.fix if isinstance(error, RlcoreError) else ""
            yield DoctorCheck(subject=subject, state="missing", text=str(error).splitlines()[0], fix=fix)


def worker() -> DoctorCheck:
    """Check that each work pool has a worker with a recent heartbeat."""
    now, silent = datetime.now(UTC), list[str]()
    pools = [each["name"] for each in _ask("work_pools/filter") if each["type"] != "prefect-agent"]
    for pool in pools:
        beats = [each["last_heartbeat_time"] for each in _ask(f"work_pools/{pool}/workers/filter")]
        heard = [datetime.fromisoformat(each) for each in beats if each]
        silent += [pool] if not heard or (now - max(heard)).total_seconds() > _SILENT_SECONDS else []
    text = f"no worker of {', '.join(silent)}" if silent else f"workers of {', '.join(pools) or 'no pool'}"
    fix = "python -m infra.services status shows the worker and its log"
    return _check("worker", text, fix=fix, is_well=bool(pools) and not silent)


def scheduler() -> DoctorCheck:
    """Check that each active schedule has planned runs: a dead loop plans none."""
    known = _ask("deployments/filter")
    active = [each for each in known if not each["paused"] and any(one["active"] for one in each["schedules"])]
    idle = [each["name"] for each in active if not _is_planned(each["id"])]
    text = f"no planned run of {', '.join(idle)}" if idle else f"{len(active)} active schedules, all with planned runs"
    fix = "restart the Prefect server; its scheduler plans runs once a minute"
    return _check("scheduler", text if active else "no schedule is active", fix=fix, is_well=not idle)


def deployments() -> DoctorCheck:
    """Check that the server has deployments."""
    count = int(_ask("deployments/count"))
    return _check("deployments", f"{count} registered", fix="python -m infra.services tell", is_well=count > 0)


def dump(home: Home) -> DoctorCheck:
    """Check the age of the newest dump."""
    newest = newest_dump(home.root)
    days = (time.time() - newest.stat().st_mtime) / 86_400 if newest else math.inf
    text = f"{days:.1f} days old" if newest else "never made"
    return DoctorCheck(subject="dump", state="ok" if days < _DUMP_DAYS else "absent", text=text, fix="rlcore dump")


def _check(subject: str, text: str, *, fix: str, is_well: bool) -> DoctorCheck:
    return DoctorCheck(subject=subject, state="ok" if is_well else "missing", text=text, fix=fix)


def _is_planned(deployment: str) -> bool:
    state, begin = {"type": {"any_": ["SCHEDULED"]}}, {"after_": datetime.now(UTC).isoformat()}
    wanted = {"deployment_id": {"any_": [deployment]}, "state": state, "expected_start_time": begin}
    return int(_ask("flow_runs/count", {"flow_runs": wanted})) > 0


def _ask(path: str, question: Mapping[str, Any] | None = None) -> Any:
    """Return the answer of the Prefect server; raise ServiceError if it does not answer or refuses."""
    url = f"{os.environ[_PREFECT].rstrip('/')}/{path}"
    try:
        answer = httpx.post(url, json=dict(question or {}), timeout=_SECONDS, **doctor.access_to("Prefect"))
        answer.raise_for_status()
        return answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ServiceError(f"the Prefect server does not say: {error}", where=url, fix="see the first line") from error
