"""Free memory as the kernel and a container's limit state it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlcore.hardware import free_memory
from rlcore.hardware.free_memory import free_bytes, total_bytes

CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with 4 KiB available, and a folder for its container's limits."""
    (tmp_path / "meminfo").write_text("MemTotal:  9 kB\nMemAvailable:       4 kB\n", encoding="ascii")
    monkeypatch.setattr(free_memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(free_memory, "_CGROUP", tmp_path)
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
