"""Free memory as the kernel and a container's limit state it."""

from __future__ import annotations

import platform
import resource
from pathlib import Path

import pytest
import torch

from rlcore.hardware import memory
from rlcore.hardware.memory import free_bytes, release_freed, total_bytes

CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with 4 KiB available, and a folder for its container's limits."""
    (tmp_path / "meminfo").write_text("MemTotal:  9 kB\nMemAvailable:       4 kB\n", encoding="ascii")
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    return tmp_path


def limit(folder: Path, maximum: str, current: int, inactive_file: int = 0) -> None:
    """Write the files of a container's limit."""
    (folder / "memory.max").write_text(f"{maximum}\n", encoding="ascii")
    (folder / "memory.current").write_text(f"{current}\n", encoding="ascii")
    (folder / "memory.stat").write_text(f"anon 7\ninactive_file {inactive_file}\n", encoding="ascii")


def test_without_a_container_it_is_what_the_machine_has_available(machine: Path) -> None:
    assert free_bytes(CPU) == total_bytes(CPU) == 4096


@pytest.mark.parametrize(
    ("maximum", "current", "cached", "free"),
    [("3000", 2000, 0, 1000), ("3000", 2000, 500, 1500), ("max", 2000, 0, 4096), ("9000", 100, 0, 4096)],
)
def test_a_container_lowers_it(machine: Path, maximum: str, current: int, cached: int, free: int) -> None:
    limit(machine, maximum, current, cached)
    assert free_bytes(CPU) == free


def test_the_older_files_of_a_container_are_read_too(machine: Path) -> None:
    (machine / "memory").mkdir()
    (machine / "memory" / "memory.limit_in_bytes").write_text("3000\n", encoding="ascii")
    (machine / "memory" / "memory.usage_in_bytes").write_text("2900\n", encoding="ascii")
    (machine / "memory" / "memory.stat").write_text("inactive_file 0\n", encoding="ascii")
    assert free_bytes(CPU) == 100


def test_where_the_kernel_says_nothing_it_is_unknown(machine: Path) -> None:
    (machine / "meminfo").unlink()
    assert free_bytes(CPU) is None


def test_this_machine_has_some() -> None:
    assert (free_bytes(CPU) or 1) > 0


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


@pytest.mark.skipif("glibc" not in platform.libc_ver(), reason="only glibc keeps freed memory of this size")
def test_freed_memory_between_tensors_that_stay_is_returned() -> None:
    tensors = [torch.ones(4096) for _ in range(8000)]  # below the size that glibc returns by itself
    kept = tensors[::100]
    del tensors
    before = resident_bytes()
    release_freed()
    assert resident_bytes() < before - 8000 * 4096 * 4 // 2
    assert all(bool((each == 1.0).all()) for each in kept)
