"""Free and total memory of a device, for this process."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import torch

_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int | None:
    """Return free bytes of a CUDA device, or of this machine within kernel and container limits; None if unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    bounds = [bound for bound in (_of_machine(_MEMINFO), _of_container(_CGROUP)) if bound is not None]
    return min(bounds, default=None)


def total_bytes(device: torch.device) -> int | None:
    """Return all bytes of a CUDA device; on a CPU the free ones, because other processes use the rest."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return free_bytes(device)


def release_freed() -> None:
    """Return freed main memory to the system, where glibc would keep it for smaller tensors."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def _of_machine(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
    except OSError:
        return None  # not Linux
    kib = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return int(kib) * 1024 if kib else None


def _of_container(cgroup: Path) -> int | None:
    """Return the bytes within a container's limit (cgroup v2, or v1); cached file pages count as free."""
    for limit, used, stat in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        try:
            bound = (cgroup / limit).read_text(encoding="ascii").strip()
            held = int((cgroup / used).read_text(encoding="ascii"))
            counters = dict(line.split() for line in (cgroup / stat).read_text(encoding="ascii").splitlines())
        except OSError:
            continue
        return max(0, int(bound) - held + int(counters.get("inactive_file", 0))) if bound.isdigit() else None
    return None
