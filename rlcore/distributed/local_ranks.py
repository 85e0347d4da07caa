"""Ranks as child processes, each with its own pipe."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from rlcore.config.distributed import DistributedConfig
from rlcore.distributed.rank import MODULE, WEIGHTS
from rlcore.distributed.rank_pool import RankPool
from rlcore.distributed.serialization import encode
from rlcore.errors import ConfigError
from rlcore.models.saving import LazyTensors

_MEMORY = Path("/dev/shm")
_GRACE_SECONDS = 5.0  # between the end of a pipe and of its process


class ChildRanks:
    """A :class:`~rlcore.distributed.rank_pool.RankTransport` of child processes, one on each of ``devices``.

    A folder in memory has the store at which they meet, and the weights that the first one exports.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self._devices, self._ends, self._starts = devices, list[Connection](), 0
        self._folder = Path(tempfile.mkdtemp(prefix="rlcore-ranks-", dir=_MEMORY if _MEMORY.is_dir() else None))

    @property
    def size(self) -> int:
        return len(self.processes)

    def start(self, setups: Sequence[Mapping[str, Any]]) -> None:
        self._starts += 1
        local = {
            "store": f"file://{self._folder}/store-{self._starts}",
            "folder": self._folder,
            "threads": max(1, torch.get_num_threads() // len(setups)),
        }
        for setup, device in zip(setups, self._devices, strict=True):
            ours, theirs = Pipe()
            self.processes.append(self.launch(theirs))
            theirs.close()
            self._ends.append(ours)
            ours.send_bytes(encode({**setup, **local, "device": device}))

    def send(self, request: bytes) -> set[int]:
        lost = set()
        for rank, end in enumerate(self._ends):
            try:
                end.send_bytes(request)
            except OSError:
                lost.add(rank)
        return lost

    def receive(self, silent: Collection[int], seconds: float) -> dict[int, bytes | None]:
        ready = wait([self._ends[rank] for rank in silent], timeout=seconds)
        return {rank: _next(self._ends[rank]) for rank in sorted(silent) if self._ends[rank] in ready}

    def exit_reason(self, rank: int) -> str:
        try:
            code = self.processes[rank].wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"

    def exported(self) -> Mapping[str, torch.Tensor]:
        file: Any = safe_open(self._folder / WEIGHTS, framework="pt")
        return LazyTensors(file.keys(), file.get_tensor)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        for end in self._ends:
            end.close()
        self.processes, self._ends = [], []

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def launch(self, end: Connection) -> subprocess.Popen[bytes]:
        """Start a process that reads its setup and its requests from ``end``."""
        paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
        return subprocess.Popen(
            [sys.executable, "-m", MODULE, str(end.fileno()), str(os.getpid())],
            pass_fds=[end.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # gloo logs its connections there
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )


def child_ranks(config: DistributedConfig, device: torch.device) -> RankPool:
    """Return a pool of child processes, on devices of the kind of ``device``.

    Raises:
        ConfigError: There are fewer GPUs than ranks.
    """
    return RankPool(ChildRanks(rank_devices(config, device)), 60.0 * config.timeout_minutes)


def rank_devices(config: DistributedConfig, device: torch.device) -> list[torch.device]:
    """Return the device of each rank, of the kind of ``device``.

    Raises:
        ConfigError: There are fewer GPUs than ranks.
    """
    size = config.learner_ranks
    if device.type != "cuda":
        if config.devices:
            raise ConfigError(
                "distributed.devices lists GPUs, but the run computes on a CPU",
                where="distributed.devices",
                fix="remove it",
            )
        return [device] * size
    chosen, count = config.devices or tuple(range(size)), torch.cuda.device_count()
    if max(chosen) >= count:
        raise ConfigError(
            f"learner_ranks = {size} needs GPUs {', '.join(map(str, chosen))}, only {count} visible",
            where="distributed.learner_ranks",
            fix="set CUDA_VISIBLE_DEVICES or distributed.devices, or lower learner_ranks",
        )
    return [torch.device("cuda", index) for index in chosen]


def _next(end: Connection) -> bytes | None:
    try:
        return end.recv_bytes()
    except (EOFError, OSError):
        return None
