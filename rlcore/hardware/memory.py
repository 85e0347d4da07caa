"""Memory that a device has, and that a stage takes of it by part. Only what asks a GPU imports torch."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CHUNK_SIZE = 1024  # rows of logits [chunk, V] in memory at once: 200 MB at a vocabulary of 49,152
_LEAST_WEIGHTS = 2**15
_MOST_ON_CPU, _FILLED_ON_CPU = 2048, 1024  # docs/benchmarks/cost.md has the measurements
FLOAT32, BFLOAT16 = 4, 2  # bytes
_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Peak bytes by part.

    Attributes:
        activations: Tensors that the update's forward passes keep for backward passes.
        packed: Copies of the native engine's linear layers while it samples on a CPU.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    kv_cache: int
    packed: int = 0

    @property
    def total(self) -> int:
        """Sum of all parts: an upper bound, since sampling and updating alternate."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.kv_cache + self.packed

    def metrics(self, num_parameters: int) -> dict[str, float]:
        """Return the metrics to log, with the total in multiples of the policy's ``num_parameters``."""
        parts = ("weights", "gradients", "optimizer", "activations", "kv_cache", "total")
        metrics = {f"memory/{part}_bytes": float(getattr(self, part)) for part in parts}
        return metrics | {
            "memory/total_multiple": self.total / (FLOAT32 * num_parameters),
            "memory/total_multiple_bf16": self.total / (BFLOAT16 * num_parameters),
        }


def is_large(num_weights: int) -> bool:
    """Return True if a call of oneDNN costs less than a product with so many weights."""
    return num_weights >= _LEAST_WEIGHTS


def positions_on(device: str, tokens_per_microbatch: int) -> int:
    """Return the budget of a pass: on a CPU at most 2,048, since larger passes leave its caches and are slower."""
    return min(tokens_per_microbatch, _MOST_ON_CPU) if device == "cpu" else tokens_per_microbatch


def filled_on(device: str, tokens_per_microbatch: int) -> int:
    """Return the positions up to which a pass takes several trees: on a CPU half, which is as fast with less memory."""
    return min(tokens_per_microbatch, _FILLED_ON_CPU) if device == "cpu" else tokens_per_microbatch


def free_bytes(device: torch.device) -> int | None:
    """Return free bytes of a CUDA device, or of this machine within kernel and container limits; None if unknown."""
    if device.type == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return free_on_machine()


def total_bytes(device: torch.device) -> int | None:
    """Return all bytes of a CUDA device; on a CPU the free ones, because other processes use the rest."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(device).total_memory)
    return free_bytes(device)


def release_freed() -> None:
    """Return freed main memory to the system, where glibc would keep it for smaller tensors."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def free_on_machine() -> int | None:
    """Return free bytes of this machine's own memory within kernel and container limits; None if unknown."""
    bounds = [bound for bound in (_of_machine(_MEMINFO), _of_container(_CGROUP)) if bound is not None]
    return min(bounds, default=None)


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
