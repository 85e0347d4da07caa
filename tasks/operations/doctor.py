"""Checks of this machine and of its servers, line by line, with a fix for each missing part: ``rlcore doctor``."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import httpx
from packaging.requirements import Requirement

from rlcore.config import HardwareConfig, to_dict
from rlcore.errors import ConfigError, RlcoreError, SandboxError, ServiceError
from rlcore.extras import (
    describe_installation,
    engine_command,
    extra_names,
    install_command,
    make_command,
    requirements,
)
from rlcore.tasks.store.cache import describe_machine
from rlcore.tasks.store.settings import Home, engine_name
from rlcore.tasks.store.state import newest_dump
from rlcore.tasks.store.storage import existing_parent

GIB = 2**30
# On the tiny model no stage takes more than 1.1 GiB, and the results 0.1 GiB; the rest is for the embedded server,
# graders and MLflow.
MEMORY_GIB, DISK_GIB = 2.0, 1.0
_SECONDS, _SERVICE_SECONDS = 3.0, 10.0  # within which a server must answer, and one of --services
_ANSWER_SECONDS = 20.0  # for a busy server
_SILENT_SECONDS = 90.0  # a worker sends a heartbeat every 30 s
_DUMP_DAYS = 8.0
_NO_RECIPE = ("pipeline", "dev", "docs")  # extras: the first is required
_MARKS = {"ok": "ok", "absent": "-", "missing": "MISSING"}
_PAGES = {"Prefect": "version", "MLflow": "api/2.0/mlflow/experiments/search?max_results=1"}
_PREFECT, _MLFLOW = "PREFECT_API_URL", "MLFLOW_TRACKING_URI"
State = Literal["ok", "absent", "missing"]


@dataclass(frozen=True, kw_only=True)
class DoctorCheck:
    """Result of one check. ``absent``: some recipes need the part, not the demo; ``missing``: the demo needs it."""

    subject: str
    state: State
    text: str
    fix: str = ""


def run_checks(home: Home) -> Iterator[DoctorCheck]:
    """Yield the results of all checks, those for the demo first."""
    checks: tuple[Callable[[], DoctorCheck], ...] = (
        python,
        installation,
        packages,
        device,
        cores,
        memory,
        partial(disk, home),
        flow_engine,
        partial(server, "Prefect", _PREFECT, "embedded: started with a run, ended with it"),
        partial(server, "MLflow", _MLFLOW, f"embedded: {home.root / 'mlflow.db'}"),
        sandbox,
        rollout_engine,
        extras,
    )
    for check in checks:
        try:
            yield check()
        except (ImportError, RlcoreError) as error:
            yield _missing("this environment", str(error), _install())


def check_services(home: Home) -> Iterator[DoctorCheck]:
    """Yield the checks of an installation with servers; without the address of a server only how to get it."""
    if not os.environ.get(_PREFECT, "").startswith("http"):
        start = make_command("services") or "start the servers"
        fix = f"{start}, then: source {home.root / 'services' / 'clients.env'}"
        yield _missing("servers", f"{_PREFECT} names none", fix)
        return
    checks: dict[str, Callable[[], DoctorCheck]] = {
        "Prefect server": partial(server, "Prefect", _PREFECT, ""),
        "MLflow server": partial(server, "MLflow", _MLFLOW, "embedded"),
        "worker": worker,
        "scheduler": scheduler,
        "deployments": deployments,
        "dump": partial(dump, home),
        "disk": partial(disk, home),
    }
    for subject, check in checks.items():
        try:
            yield check()
        except (RlcoreError, OSError) as error:
            yield _missing(subject, str(error).splitlines()[0], error.fix if isinstance(error, RlcoreError) else "")


def lines(finding: DoctorCheck) -> str:
    """Format a result for a terminal: one line, and a second with the fix."""
    fix = f"\n{'':<29}{finding.fix}" if finding.fix and finding.state != "ok" else ""
    return f"{_MARKS[finding.state]:<9}{finding.subject:<20}{finding.text}{fix}"


def _ok(subject: str, text: str) -> DoctorCheck:
    return DoctorCheck(subject=subject, state="ok", text=text)


def _missing(subject: str, text: str, fix: str) -> DoctorCheck:
    return DoctorCheck(subject=subject, state="missing", text=text, fix=fix)


def _absent(subject: str, text: str, fix: str) -> DoctorCheck:
    return DoctorCheck(subject=subject, state="absent", text=text, fix=fix)


def python() -> DoctorCheck:
    """Report the interpreter and the operating system."""
    text = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, {sys.executable}"
    is_old = sys.version_info < (3, 11)
    return _missing("python", text, "take Python 3.11 or newer") if is_old else _ok("python", text)


def installation() -> DoctorCheck:
    """Report the version of rlcore, and where it is installed."""
    return _ok("rlcore", describe_installation())


def packages() -> DoctorCheck:
    """Report the required libraries and their versions."""
    errors = [error for each in (*requirements(), *requirements("pipeline")) if (error := _error_of(each))]
    if errors:
        return _missing("packages", "; ".join(errors), _install())
    shown = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers", "prefect", "mlflow"))
    return _ok("packages", shown)


def device(config: HardwareConfig | None = None) -> DoctorCheck:
    """Report the device of ``device = "auto"``, its precision and instructions."""
    import torch

    from rlcore.hardware.machine import find_machine, product_seconds

    try:
        found = find_machine(config or HardwareConfig())
    except ConfigError as error:
        return _missing("device", error.what, error.fix)
    text = describe_machine(to_dict(found))
    if found.device == "cuda":
        sizes = [torch.cuda.get_device_properties(card).total_memory for card in range(torch.cuda.device_count())]
        return _ok("device", f"{text}; {len(sizes)} x {min(sizes) / GIB:.0f} GiB")
    speed = product_seconds(torch.float32) / product_seconds(torch.bfloat16)  # measured now
    return _ok("device", f"{text}; bfloat16 products {speed:.1f}× as fast as float32's")


def cores() -> DoctorCheck:
    """Report the processor cores that this process may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return _ok("cores", f"{usable} usable of {os.cpu_count()}")


def memory() -> DoctorCheck:
    """Report the free memory, as far as kernel and container allow."""
    import torch

    from rlcore.hardware.memory import free_bytes

    free = free_bytes(torch.device("cpu"))
    if free is None:
        return _ok("memory", "unknown on this system")
    text = f"{free / GIB:.1f} GiB free"
    fix = f"the demo takes up to {MEMORY_GIB:g} GiB: end other programs, or raise the container's limit"
    return _missing("memory", text, fix) if free < MEMORY_GIB * GIB else _ok("memory", text)


def disk(home: Home) -> DoctorCheck:
    """Check that the state folder can be written, and report its free space."""
    place = existing_parent(home.root)
    if not os.access(place, os.W_OK | os.X_OK):
        return _missing("disk", f"{place} cannot be written", "set RLCORE_HOME to another folder")
    free = shutil.disk_usage(place).free
    text = f"{free / GIB:.1f} GiB free in {home.root}"
    fix = f"the demo writes up to {DISK_GIB:g} GiB: make room, or set RLCORE_HOME to a larger disk"
    return _missing("disk", text, fix) if free < DISK_GIB * GIB else _ok("disk", text)


def flow_engine() -> DoctorCheck:
    """Report the engine of the flows."""
    try:
        return _ok("flow engine", f"{engine_name()} (RLCORE_ENGINE=prefect|inline)")
    except ConfigError as error:
        return _missing("flow engine", error.what, f"{error.where}: {error.fix}")


def server(name: str, variable: str, without: str) -> DoctorCheck:
    """Check that the server of an environment variable answers; ``without``: the text if the variable is not set."""
    url, subject = os.environ.get(variable, ""), f"{name} server"
    if not url.startswith("http"):
        return _ok(subject, url or without)
    fix, base, access = _start(variable), url.rstrip("/"), access_to(name)
    try:
        with httpx.Client(timeout=_SECONDS, headers=access["headers"]) as client:
            # MLflow has it next to its pages, Prefect below its API. Only that page requires authentication.
            answer = client.get(f"{base}/health")
            page = f"{base}/{_PAGES[name]}"
            is_open = answer.is_success and client.get(page).is_success
            if answer.is_success and not is_open:
                answer = client.get(page, auth=access["auth"])
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return _missing(subject, f"{url} does not answer: {error}", fix)
    user = access["auth"][0]
    if answer.status_code in (401, 403):
        text = f"{url} does not let {f'the user {user}' if user else 'us'} in ({answer.status_code})"
        return _missing(subject, text, "set the user and password of the server, such as by its clients.env")
    if not answer.is_success:
        return _missing(subject, f"{url} answers {answer.status_code}", fix)
    return _ok(subject, f"{url} answers {answer.status_code} to {'everybody' if is_open else f'the user {user}'}")


def _start(variable: str) -> str:
    services = make_command("services")
    return f"start it{f' ({services})' if services else ''}, or unset {variable} for the embedded one"


def require_mlflow() -> None:
    """Require that a server answers at MLflow's address: a run waits for it for minutes, a person does not.

    Whatever it answers is left to MLflow's client, which knows more ways to log in.
    Raises:
        ServiceError: none answers within 20 s, or the ``MLFLOW_HTTP_REQUEST_TIMEOUT`` if that is shorter.
    """
    url = os.environ[_MLFLOW]
    try:
        seconds = min(_ANSWER_SECONDS, float(os.environ.get("MLFLOW_HTTP_REQUEST_TIMEOUT") or _ANSWER_SECONDS))
        httpx.get(url, timeout=seconds, verify=False)
    except (httpx.TransportError, httpx.InvalidURL, ValueError) as error:
        raise ServiceError(
            f"MLflow server: {url} does not answer: {error}", where=_MLFLOW, fix=_start(_MLFLOW)
        ) from error


def access_to(name: str) -> dict[str, Any]:
    """Return user and password for a server, and headers for a proxy before it, as its client has them."""
    if name == "Prefect":
        user, _, password = os.environ.get("PREFECT_API_AUTH_STRING", "").partition(":")
        headers = json.loads(os.environ.get("PREFECT_CLIENT_CUSTOM_HEADERS") or "{}")
        return {"auth": (user, password), "headers": headers}
    login = (os.environ.get("MLFLOW_TRACKING_USERNAME", ""), os.environ.get("MLFLOW_TRACKING_PASSWORD", ""))
    return {"auth": login, "headers": {}}


def sandbox() -> DoctorCheck:
    """Check that untrusted programs can be isolated, by starting and attacking sandboxes."""
    from rlcore.sandbox.pool import SandboxPool

    try:
        with SandboxPool(num_workers=1) as pool:
            pool.run("pass")
    except SandboxError as error:
        return _absent("sandbox", f"{error.what}; rewards that run programs and the Python tool need it", error.fix)
    return _ok("sandbox", "bubblewrap; its self-test has passed")


def rollout_engine() -> DoctorCheck:
    """Report the environment that has vLLM; the native engine is always available."""
    own, subject = Path(".venv-engine/bin/python"), "rollout engines"
    if importlib.util.find_spec("vllm"):
        return _ok(subject, "native; vLLM in this environment")
    if own.exists():
        return _ok(subject, f"native; vLLM by engine.python = {str(own)!r}")
    text = "native alone; engine.kind = 'vllm' needs vLLM in an environment of its own"
    return _absent(subject, text, f"{engine_command()}; engine.python names it")


def extras() -> DoctorCheck:
    """Report the extras that recipes need."""
    names = [name for name in extra_names() if name not in _NO_RECIPE]
    missing = [name for name in names if any(map(_error_of, requirements(name)))]
    there = ", ".join(name for name in names if name not in missing) or "none"
    if not missing:
        return _ok("extras", there)
    fix = f"one of them, such as {missing[0]}: {install_command(missing[0])}"
    return _absent("extras", f"{there}; not installed: {', '.join(missing)}", fix)


def worker() -> DoctorCheck:
    """Check that each work pool has a worker with a recent heartbeat."""
    now, silent = datetime.now(UTC), list[str]()
    pools = [each["name"] for each in _ask("work_pools/filter") if each["type"] != "prefect-agent"]
    for pool in pools:
        beats = [each["last_heartbeat_time"] for each in _ask(f"work_pools/{pool}/workers/filter")]
        heard = [datetime.fromisoformat(each) for each in beats if each]
        silent += [pool] if not heard or (now - max(heard)).total_seconds() > _SILENT_SECONDS else []
    if pools and not silent:
        return _ok("worker", f"workers of {', '.join(pools)}")
    text = f"no worker of {', '.join(silent)}" if silent else "workers of no pool"
    return _missing("worker", text, "python -m infra.services status shows the worker and its log")


def scheduler() -> DoctorCheck:
    """Check that each active schedule has planned runs: a dead loop plans none."""
    known = _ask("deployments/filter")
    active = [each for each in known if not each["paused"] and any(one["active"] for one in each["schedules"])]
    if idle := [each["name"] for each in active if not _is_planned(each["id"])]:
        fix = "restart the Prefect server; its scheduler plans runs once a minute"
        return _missing("scheduler", f"no planned run of {', '.join(idle)}", fix)
    text = f"{len(active)} active schedules, all with planned runs" if active else "no schedule is active"
    return _ok("scheduler", text)


def deployments() -> DoctorCheck:
    """Check that the server has deployments."""
    text = f"{(count := int(_ask('deployments/count')))} registered"
    return _ok("deployments", text) if count else _missing("deployments", text, "python -m infra.services tell")


def dump(home: Home) -> DoctorCheck:
    """Check the age of the newest dump."""
    newest = newest_dump(home.root)
    days = (time.time() - newest.stat().st_mtime) / 86_400 if newest else math.inf
    text = f"{days:.1f} days old" if newest else "never made"
    return _ok("dump", text) if days < _DUMP_DAYS else _absent("dump", text, "rlcore dump")


def _is_planned(deployment: str) -> bool:
    state, begin = {"type": {"any_": ["SCHEDULED"]}}, {"after_": datetime.now(UTC).isoformat()}
    wanted = {"deployment_id": {"any_": [deployment]}, "state": state, "expected_start_time": begin}
    return int(_ask("flow_runs/count", {"flow_runs": wanted})) > 0


def _ask(path: str, question: Mapping[str, Any] | None = None) -> Any:
    url = f"{os.environ[_PREFECT].rstrip('/')}/{path}"
    try:
        answer = httpx.post(url, json=dict(question or {}), timeout=_SERVICE_SECONDS, **access_to("Prefect"))
        answer.raise_for_status()
        return answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ServiceError(f"the Prefect server does not say: {error}", where=url, fix="see the first line") from error


def _install() -> str:
    return make_command("setup") or install_command("pipeline")


def _error_of(requirement: Requirement) -> str:
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return f"{requirement.name} is missing"
    return "" if version in requirement.specifier else f"{requirement.name} is {version}, not {requirement.specifier}"
