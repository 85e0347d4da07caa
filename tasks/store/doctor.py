"""Checks of this machine, line by line, with a fix for each missing part: ``rlcore doctor``."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement

from rlcore.config import HardwareConfig, to_dict
from rlcore.errors import ConfigError, RlcoreError, SandboxError
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

GIB = 2**30
# On the tiny model no stage takes more than 1.1 GiB, and the results 0.1 GiB; the rest is for the embedded server,
# graders and MLflow.
MEMORY_GIB, DISK_GIB = 2.0, 1.0
_SECONDS = 3.0  # seconds within which a server must answer
_NO_RECIPE = ("pipeline", "dev", "docs")  # extras: the first is required
_MARKS = {"ok": "ok", "absent": "-", "missing": "MISSING"}
_PAGES = {"Prefect": "version", "MLflow": "api/2.0/mlflow/experiments/search?max_results=1"}
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
        lambda: disk(home),
        flow_engine,
        lambda: server("Prefect", "PREFECT_API_URL", "embedded: started with a run, ended with it"),
        lambda: server("MLflow", "MLFLOW_TRACKING_URI", f"embedded: {home.root / 'mlflow.db'}"),
        sandbox,
        rollout_engine,
        extras,
    )
    return map(_tried, checks)


def _tried(check: Callable[[], DoctorCheck]) -> DoctorCheck:
    try:
        return check()
    except (ImportError, RlcoreError) as error:
        return DoctorCheck(subject="this environment", state="missing", text=str(error), fix=_install())


def lines(finding: DoctorCheck) -> str:
    """Format a result for a terminal: one line, and a second with the fix."""
    fix = f"\n{'':<29}{finding.fix}" if finding.fix and finding.state != "ok" else ""
    return f"{_MARKS[finding.state]:<9}{finding.subject:<20}{finding.text}{fix}"


def python() -> DoctorCheck:
    """Report the interpreter and the operating system."""
    text = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, {sys.executable}"
    is_old = sys.version_info < (3, 11)
    return DoctorCheck(
        subject="python", state="missing" if is_old else "ok", text=text, fix="take Python 3.11 or newer"
    )


def installation() -> DoctorCheck:
    """Report the version of rlcore, and where it is installed."""
    return DoctorCheck(subject="rlcore", state="ok", text=describe_installation())


def packages() -> DoctorCheck:
    """Report the required libraries and their versions."""
    errors = [error for each in (*requirements(), *requirements("pipeline")) if (error := _error_of(each))]
    if errors:
        return DoctorCheck(subject="packages", state="missing", text="; ".join(errors), fix=_install())
    shown = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers", "prefect", "mlflow"))
    return DoctorCheck(subject="packages", state="ok", text=shown)


def device(config: HardwareConfig | None = None) -> DoctorCheck:
    """Report the device of ``device = "auto"``, its precision and instructions."""
    import torch

    from rlcore.hardware.machine import find_machine

    try:
        found = find_machine(config or HardwareConfig())
    except ConfigError as error:
        return DoctorCheck(subject="device", state="missing", text=error.what, fix=error.fix)
    text = describe_machine(to_dict(found))
    if found.device == "cuda":
        sizes = [torch.cuda.get_device_properties(card).total_memory for card in range(torch.cuda.device_count())]
        return DoctorCheck(subject="device", state="ok", text=f"{text}; {len(sizes)} x {min(sizes) / GIB:.0f} GiB")
    return DoctorCheck(subject="device", state="ok", text=f"{text}; {_half_precision()}")


def cores() -> DoctorCheck:
    """Report the processor cores that this process may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return DoctorCheck(subject="cores", state="ok", text=f"{usable} usable of {os.cpu_count()}")


def memory() -> DoctorCheck:
    """Report the free memory, as far as kernel and container allow."""
    import torch

    from rlcore.hardware.memory import free_bytes

    free = free_bytes(torch.device("cpu"))
    if free is None:
        return DoctorCheck(subject="memory", state="ok", text="unknown on this system")
    is_short = free < MEMORY_GIB * GIB
    fix = f"the demo takes up to {MEMORY_GIB:g} GiB: end other programs, or raise the container's limit"
    return DoctorCheck(
        subject="memory", state="missing" if is_short else "ok", text=f"{free / GIB:.1f} GiB free", fix=fix
    )


def disk(home: Home) -> DoctorCheck:
    """Check that the state folder can be written, and report its free space."""
    place = next(path for path in (home.root, *home.root.parents) if path.exists())
    free = shutil.disk_usage(place).free
    text = f"{free / GIB:.1f} GiB free in {home.root}"
    if not os.access(place, os.W_OK | os.X_OK):
        return DoctorCheck(
            subject="disk", state="missing", text=f"{place} cannot be written", fix="set RLCORE_HOME to another folder"
        )
    is_short = free < DISK_GIB * GIB
    fix = f"the demo writes up to {DISK_GIB:g} GiB: make room, or set RLCORE_HOME to a larger disk"
    return DoctorCheck(subject="disk", state="missing" if is_short else "ok", text=text, fix=fix)


def flow_engine() -> DoctorCheck:
    """Report the engine of the flows."""
    try:
        return DoctorCheck(subject="flow engine", state="ok", text=f"{engine_name()} (RLCORE_ENGINE=prefect|inline)")
    except ConfigError as error:
        return DoctorCheck(subject="flow engine", state="missing", text=error.what, fix=f"{error.where}: {error.fix}")


def server(name: str, variable: str, without: str) -> DoctorCheck:
    """Check that the server of an environment variable answers; ``without``: the text if the variable is not set."""
    url = os.environ.get(variable, "")
    if not url.startswith("http"):
        return DoctorCheck(subject=f"{name} server", state="ok", text=url or without)
    import httpx

    services = make_command("services")
    start = f"start it ({services})" if services else "start it"
    fix = f"{start}, or unset {variable} for the embedded one"
    base = url.rstrip("/")
    try:
        with httpx.Client(timeout=_SECONDS, headers=access_to(name)["headers"]) as client:
            # MLflow has it next to its pages, Prefect below its API. Only that page requires authentication.
            answer = client.get(f"{base}/health")
            page = f"{base}/{_PAGES[name]}"
            is_open = answer.is_success and client.get(page).is_success
            if answer.is_success and not is_open:
                answer = client.get(page, auth=access_to(name)["auth"])
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return DoctorCheck(subject=f"{name} server", state="missing", text=f"{url} does not answer: {error}", fix=fix)
    user = access_to(name)["auth"][0]
    if answer.status_code in (401, 403):
        text = f"{url} does not let {f'the user {user}' if user else 'us'} in ({answer.status_code})"
        fix = "set the user and password of the server, such as by its clients.env"
        return DoctorCheck(subject=f"{name} server", state="missing", text=text, fix=fix)
    state: State = "ok" if answer.is_success else "missing"
    whom = " everybody" if is_open else f" the user {user}" if answer.is_success else ""
    text = f"{url} answers {answer.status_code}{whom and f' to{whom}'}"
    return DoctorCheck(subject=f"{name} server", state=state, text=text, fix=fix)


def access_to(name: str) -> dict[str, Any]:
    """Return user and password for a server, and headers for a proxy before it, as its client has them."""
    if name == "Prefect":
        user, _, password = os.environ.get("PREFECT_API_AUTH_STRING", "").partition(":")
        return {
            "auth": (user, password),
            "headers": json.loads(os.environ.get("PREFECT_CLIENT_CUSTOM_HEADERS") or "{}"),
        }
    login = (os.environ.get("MLFLOW_TRACKING_USERNAME", ""), os.environ.get("MLFLOW_TRACKING_PASSWORD", ""))
    return {"auth": login, "headers": {}}


def sandbox() -> DoctorCheck:
    """Check that untrusted programs can be isolated, by starting and attacking sandboxes."""
    from rlcore.sandbox.pool import SandboxPool

    try:
        with SandboxPool(num_workers=1) as pool:
            pool.run("pass")
    except SandboxError as error:
        text = f"{error.what}; rewards that run programs and the Python tool need it"
        return DoctorCheck(subject="sandbox", state="absent", text=text, fix=error.fix)
    return DoctorCheck(subject="sandbox", state="ok", text="bubblewrap; its self-test has passed")


def rollout_engine() -> DoctorCheck:
    """Report the environment that has vLLM; the native engine is always available."""
    own = Path(".venv-engine/bin/python")
    if importlib.util.find_spec("vllm"):
        return DoctorCheck(subject="rollout engines", state="ok", text="native; vLLM in this environment")
    if own.exists():
        return DoctorCheck(subject="rollout engines", state="ok", text=f"native; vLLM by engine.python = {str(own)!r}")
    text = "native alone; engine.kind = 'vllm' needs vLLM in an environment of its own"
    return DoctorCheck(
        subject="rollout engines", state="absent", text=text, fix=f"{engine_command()}; engine.python names it"
    )


def extras() -> DoctorCheck:
    """Report the extras that recipes need."""
    names = [name for name in extra_names() if name not in _NO_RECIPE]
    states = {name: not any(map(_error_of, requirements(name))) for name in names}
    there = ", ".join(name for name, is_there in states.items() if is_there) or "none"
    missing = [name for name, is_there in states.items() if not is_there]
    if not missing:
        return DoctorCheck(subject="extras", state="ok", text=there)
    text = f"{there}; not installed: {', '.join(missing)}"
    fix = f"one of them, such as {missing[0]}: {install_command(missing[0])}"
    return DoctorCheck(subject="extras", state="absent", text=text, fix=fix)


def _half_precision() -> str:
    """State the speed of bfloat16's products, measured now, as a multiple of float32's."""
    import torch

    from rlcore.hardware.machine import product_seconds

    speed = product_seconds(torch.float32) / product_seconds(torch.bfloat16)
    return f"bfloat16 products {speed:.1f}× as fast as float32's"


def _install() -> str:
    """Return the command that installs what is missing; a checkout has pinned versions."""
    return make_command("setup") or install_command("pipeline")


def _error_of(requirement: Requirement) -> str:
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return f"{requirement.name} is missing"
    return "" if version in requirement.specifier else f"{requirement.name} is {version}, not {requirement.specifier}"
