"""Health of an installation with servers, line by line with a fix: ``rlcore doctor --services``."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import httpx

from rlcore.errors import RlcoreError, ServiceError
from rlcore.extras import make_command
from rlcore.tasks.operations.backup_target import last_backup
from rlcore.tasks.store import doctor
from rlcore.tasks.store.audit_log import chain_errors, read_entries
from rlcore.tasks.store.settings import Home

_SECONDS = 10.0  # seconds within which a server must answer
_LATE = (1.0, 10.0)  # limits at which a figure warns and fails: late runs
_WAIT_HOURS, _SILENT_SECONDS = (1.0, 24.0), 90.0  # a worker sends a heartbeat every 30 s
_BACKUP_DAYS, _DISK_DAYS = (2.0, 8.0), (30.0, 7.0)
_MISSED_INTERVALS = (2.0, 4.0)  # without a completed retraining
_GROWTH_DAYS = 14.0  # over which the growth of the disk is measured
_GIB = 2**30
_PREFECT = "PREFECT_API_URL"
State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, kw_only=True)
class ServiceCheck:
    """Result of a check; ``value`` is its figure in ``unit``, NaN if there is none."""

    subject: str
    state: State
    text: str
    fix: str = ""
    value: float = math.nan
    unit: str = ""


def check_services(home: Home) -> Iterator[ServiceCheck]:
    """Yield the results of all checks.

    Without the address of a server there is one line, which says how to get it. Checks of the state directory are left
    out where there is none, as in a worker that starts its runs on other machines.
    """
    if not os.environ.get(_PREFECT, "").startswith("http"):
        start = make_command("services") or "start the servers"
        fix = f"{start}, then: source {home.root / 'services' / 'clients.env'}"
        yield ServiceCheck(subject="servers", state="fail", text=f"{_PREFECT} names none", fix=fix)
        return
    checks: dict[str, Callable[[], ServiceCheck]] = {
        "Prefect server": partial(server, "Prefect", _PREFECT),
        "MLflow server": partial(server, "MLflow", "MLFLOW_TRACKING_URI"),
        "worker": worker,
        "scheduler": scheduler,
        "late runs": late_runs,
        "queue wait": queue_wait,
        "retraining": retraining,
        "automations": automations,
    }
    of_home: Mapping[str, Callable[[Home], ServiceCheck]] = {"backup": backup, "disk": disk, "audit log": audit_log}
    if home.is_made:
        checks = checks | {subject: partial(check, home) for subject, check in of_home.items()}
    for subject, check in checks.items():
        try:
            yield check()
        except (RlcoreError, OSError) as error:
            yield ServiceCheck(subject=subject, state="fail", text=str(error).splitlines()[0], fix=_fix_of(error))


def lines(check: ServiceCheck) -> str:
    """Format a result for a terminal: one line, and a second with the fix."""
    fix = f"\n{'':<21}{check.fix}" if check.fix and check.state != "ok" else ""
    return f"{check.state if check.state != 'fail' else 'FAIL':<6}{check.subject:<15}{check.text}{fix}"


def server(name: str, variable: str) -> ServiceCheck:
    """Check that a server answers and lets this user in."""
    found = doctor.server(name, variable, "embedded, so that only this process sees it")
    state: State = "ok" if found.state == "ok" else "fail"
    return ServiceCheck(subject=found.subject, state=state, text=found.text, fix=found.fix)


def worker() -> ServiceCheck:
    """Check that each work pool has a worker with a recent heartbeat."""
    now, silent = datetime.now(UTC), list[str]()
    pools = [each["name"] for each in ask("work_pools/filter") if each["type"] != "prefect-agent"]
    for pool in pools:
        known = ask(f"work_pools/{pool}/workers/filter")
        heard = [_time(each["last_heartbeat_time"]) for each in known if each["last_heartbeat_time"]]
        silent += [pool] if not heard or (now - max(heard)).total_seconds() > _SILENT_SECONDS else []
    return ServiceCheck(
        subject="worker",
        state="fail" if silent or not pools else "ok",
        text=f"no worker of {', '.join(silent)}" if silent else f"workers of {', '.join(pools) or 'no pool'}",
        fix="python -m infra.services status shows the worker and its log",
        value=float(len(silent)),
        unit="pools",
    )


def scheduler() -> ServiceCheck:
    """Check that each active schedule has planned runs: a dead loop plans none."""
    active = {each["id"]: each["name"] for each in ask("deployments/filter") if _is_scheduled(each)}
    idle = [name for each, name in active.items() if not _planned(each, limit=1)]
    text = f"no planned run of {', '.join(idle)}" if idle else f"{len(active)} active schedules, all with planned runs"
    return ServiceCheck(
        subject="scheduler",
        state="fail" if idle else "ok",
        text=text if active else "no schedule is active",
        fix="restart the Prefect server; its scheduler plans runs once a minute",
        value=float(len(idle)),
        unit="schedules",
    )


def late_runs() -> ServiceCheck:
    """Count the runs that should have started."""
    count = float(ask("flow_runs/count", _LATE_RUNS))
    return ServiceCheck(
        subject="late runs",
        state=_state(count, _LATE),
        text=f"{count:.0f} runs should have started",
        fix="see the queue and its limit on the page Work Pools; delete runs that are no longer wanted",
        value=count,
        unit="runs",
    )


def queue_wait() -> ServiceCheck:
    """Measure the wait of the oldest late run."""
    oldest = ask("flow_runs/filter", {**_LATE_RUNS, "sort": "EXPECTED_START_TIME_ASC", "limit": 1})
    hours = _age(oldest[0]["expected_start_time"]) * 24.0 if oldest else 0.0
    return ServiceCheck(
        subject="queue wait",
        state=_state(hours, _WAIT_HOURS),
        text=f"{hours:.1f} h" + (f": {oldest[0]['name']}" if oldest else ""),
        fix="see which run holds the queue, cancel it, or raise the queue's limit if the machine has room",
        value=hours,
        unit="hours",
    )


def retraining() -> ServiceCheck:
    """Measure the days since a retraining completed, or since its schedule was enabled; without one none is missing."""
    query = {"flows": {"name": {"any_": ["retrain"]}}, "flow_runs": {"state": {"type": {"any_": ["COMPLETED"]}}}}
    last = ask("flow_runs/filter", {**query, "sort": "END_TIME_DESC", "limit": 1})
    scheduled = [each for each in ask("deployments/filter", {"flows": query["flows"]}) if _is_scheduled(each)]
    planned = [_time(run["expected_start_time"]) for each in scheduled for run in _planned(each["id"], limit=2)]
    interval = (max(planned) - min(planned)) / timedelta(days=1) if len(planned) > 1 else math.inf
    enabled = [each["updated"] for deployment in scheduled for each in deployment["schedules"] if each["active"]]
    days = min((_age(each) for each in [*enabled, *(run["end_time"] for run in last)]), default=math.nan)
    text = f"last completed {_age(last[0]['end_time']):.1f} days ago" if last else "none has completed"
    return ServiceCheck(
        subject="retraining",
        state=_state(days, (_MISSED_INTERVALS[0] * interval, _MISSED_INTERVALS[1] * interval)),
        text=f"{text}; {f'scheduled every {interval:.2g} days' if planned else 'not scheduled'}",
        fix="read the newest run of the flow retrain: a gate, its data or the queue stopped it",
        value=days,
        unit="days",
    )


def automations() -> ServiceCheck:
    """Count the actions of automations, such as webhooks, that failed within a day."""
    since = (datetime.now(UTC) - timedelta(days=1)).isoformat()
    wanted = {"occurred": {"since": since}, "event": {"name": ["prefect.automation.action.failed"]}}
    count = float(ask("events/filter", {"filter": wanted, "limit": 1})["total"])
    return ServiceCheck(
        subject="automations",
        state="fail" if count else "ok",
        text=f"{count:.0f} actions failed within a day",
        fix="the event prefect.automation.action.failed has the reason; check the address of the webhook",
        value=count,
        unit="actions",
    )


def backup(home: Home) -> ServiceCheck:
    """Measure the age of the newest backup."""
    last = last_backup(home)
    days = _age(last["time"]) if last else math.nan
    return ServiceCheck(
        subject="backup",
        state=_state(days, _BACKUP_DAYS) if last else "warn",
        text=f"{days:.1f} days old, in {last['target']}" if last else "never made",
        fix="rlcore backup DIR, by hand or on a schedule",
        value=days,
        unit="days",
    )


def disk(home: Home) -> ServiceCheck:
    """Estimate the days until the disk is full, from the files that were written lately and never change."""
    free, growth = shutil.disk_usage(home.root).free, daily_growth(home)
    days = free / growth if growth else math.inf
    is_short = [days <= limit for limit in _DISK_DAYS]
    lasts = f"{days:.0f} days at" if growth else "no growth:"
    return ServiceCheck(
        subject="disk",
        state="fail" if is_short[1] else "warn" if is_short[0] else "ok",
        text=f"{lasts} {growth / _GIB:.3g} GiB a day; {free / _GIB:.1f} GiB free in {home.root}",
        fix="rlcore gc removes what no model needs; or move the state directory to a larger disk",
        value=days,
        unit="days",
    )


def audit_log(home: Home) -> ServiceCheck:
    """Verify the chain of the audit log."""
    errors = chain_errors(home)
    return ServiceCheck(
        subject="audit log",
        state="fail" if errors else "ok",
        text=errors[0] if errors else f"{len(read_entries(home))} entries, none was changed",
        fix="restore audit.jsonl from a backup, and find out who changed it",
        value=float(len(errors)),
        unit="errors",
    )


def daily_growth(home: Home) -> float:
    """Return the bytes per day of artifacts and MLflow's files, over two weeks or the age of the first of them."""
    now, seen, first, total = time.time(), set[int](), math.inf, 0
    for state in _files(home.artifacts, home.mlartifacts, home.root / "services" / "mlflow-artifacts"):
        if state.st_ino not in seen:  # a file may have two names
            seen.add(state.st_ino)
            first = min(first, state.st_mtime)
            total += state.st_size if now - state.st_mtime < _GROWTH_DAYS * 86_400 else 0
    days = min(max((now - first) / 86_400, 1.0), _GROWTH_DAYS)
    return total / days


def _files(*folders: Path) -> Iterator[os.stat_result]:
    """Yield the states of all files; those that are removed meanwhile are left out."""
    for parent, _, names in (step for folder in folders for step in os.walk(folder)):
        for name in names:
            with suppress(FileNotFoundError):
                yield Path(parent, name).lstat()


def ask(path: str, question: Mapping[str, Any] | None = None) -> Any:
    """Return the answer of the Prefect server that ``PREFECT_API_URL`` names.

    Raises:
        ServiceError: it does not answer, or refuses.
    """
    url = f"{os.environ[_PREFECT].rstrip('/')}/{path}"
    try:
        answer = httpx.post(url, json=dict(question or {}), timeout=_SECONDS, **doctor.access_to("Prefect"))
        answer.raise_for_status()
        return answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ServiceError(f"the Prefect server does not say: {error}", where=url, fix="see the first line") from error


_LATE_RUNS: Mapping[str, Any] = {"flow_runs": {"state": {"name": {"any_": ["Late"]}}}}


def _is_scheduled(deployment: Mapping[str, Any]) -> bool:
    return not deployment["paused"] and any(each["active"] for each in deployment["schedules"])


def _planned(deployment: str, *, limit: int) -> list[Mapping[str, Any]]:
    """Return the next scheduled runs of a deployment."""
    state, begin = {"type": {"any_": ["SCHEDULED"]}}, {"after_": datetime.now(UTC).isoformat()}
    query = {"flow_runs": {"deployment_id": {"any_": [deployment]}, "state": state, "expected_start_time": begin}}
    found: list[Mapping[str, Any]] = ask(
        "flow_runs/filter", query | {"sort": "EXPECTED_START_TIME_ASC", "limit": limit}
    )
    return found


def _state(value: float, limits: tuple[float, float]) -> State:
    return "fail" if value >= limits[1] else "warn" if value >= limits[0] else "ok"


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)


def _age(text: str) -> float:
    """Return the days since a time."""
    return (datetime.now(UTC) - _time(text)) / timedelta(days=1)


def _fix_of(error: BaseException) -> str:
    return error.fix if isinstance(error, RlcoreError) else ""
