"""Machine, table and file of a benchmark's results."""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

QUIET_LOAD = 1.5  # one-minute load average above which wall times are unreliable
LIBRARIES = ("torch", "transformers", "trl")


def describe(loads: Sequence[float]) -> str:
    """Describe the machine in a sentence; ``loads``: at the start and after each arm, which adds one."""
    versions = ", ".join(filter(None, map(_version, LIBRARIES)))
    quiet = loads[0] < QUIET_LOAD and max(loads) < 1 + QUIET_LOAD
    state = "quiet machine" if quiet else "BUSY machine: compare CPU seconds, not wall seconds"
    return (
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores of {processor()}, Python "
        f"{platform.python_version()}, {versions}; load {loads[0]:.1f} to {max(loads):.1f} ({state})."
    )


def processor() -> str:
    """Return the processor's name, and the units that decide its speed."""
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


def write(path: Path, report: Any) -> None:
    """Write the report as JSON, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(report, indent=1), encoding="utf-8")
    temporary.replace(path)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Render a Markdown table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))
