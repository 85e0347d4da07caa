"""Common parts of comparisons: arms as processes that print one line of JSON, the machine, tables."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

QUIET_LOAD = 1.5  # one-minute load average above which wall times are unreliable
LIBRARIES = ("torch", "transformers", "trl")
Timing = Mapping[str, Any]


def run_arm(arm: str, arguments: Sequence[str], threads: int, *, timeout: float | None = None) -> Timing:
    """Run an arm in its own process and return its last line; the arguments follow ``python -m``.

    A process that fails or times out (seconds) gives ``failed``, its reason.
    """
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "ignore", "-m", *arguments]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the compilers that it may have started
        process.communicate()
        return {"failed": f"no result in {timeout:.0f} s"}
    if process.returncode != 0:
        lines = [line for line in errors.splitlines() if line[:1].strip()]
        return {"failed": lines[-1][:300] if lines else f"{arm} exits with {process.returncode}"}
    timing: Timing = json.loads(output.strip().splitlines()[-1])
    return timing


def describe(threads: int, loads: Sequence[float]) -> str:
    """Describe the machine in a sentence. Loads: at the start and after each arm; this process adds one per thread."""
    versions = ", ".join(filter(None, map(_version, LIBRARIES)))
    quiet = loads[0] < QUIET_LOAD and max(loads) < threads + QUIET_LOAD
    state = "quiet machine" if quiet else "BUSY machine: compare CPU seconds, not wall seconds"
    return (
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores of {processor()}, Python "
        f"{platform.python_version()}, {versions}; load {loads[0]:.1f} to {max(loads):.1f} ({state})."
    )


def processor() -> str:
    """Return the processor's name, and the units that decide the speed of its products."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.machine()
    name = re.search(r"model name\s*: (.*)", text)
    units = [unit for unit in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f" {unit}" in text]
    return f"{name.group(1) if name else platform.machine()} ({', '.join(units)})"


def _version(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return ""


def write(path: Path, report: Mapping[str, Any]) -> None:
    """Write the report as JSON, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(report, indent=1), encoding="utf-8")
    temporary.replace(path)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Render a Markdown table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))
