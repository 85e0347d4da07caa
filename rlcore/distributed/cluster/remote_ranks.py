"""Learner ranks as processes of a cluster."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from safetensors.torch import load

from rlcore.distributed.cluster.ray_cluster import Cluster, Pending, RemoteBytes, RemoteProcess
from rlcore.distributed.rank_pool import RankPool
from rlcore.distributed.serialization import encode
from rlcore.errors import LearnerLostError


class RemoteWeights(Mapping[str, torch.Tensor]):
    """Mapping of weights on a cluster. Samplers there fetch ``blob``; here tensors are loaded on access."""

    def __init__(self, cluster: Cluster, blob: RemoteBytes) -> None:
        self.blob, self._cluster = blob, cluster

    @cached_property
    def _tensors(self) -> dict[str, torch.Tensor]:
        return load(self._cluster.fetch(self.blob))

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class RemoteRanks:
    """A :class:`~rlcore.distributed.rank_pool.RankTransport` of Ray processes. ``device``: that of each rank.

    They connect at the first one's machine. A dead rank is not restarted alone, because others may hold its shards.
    """

    def __init__(self, cluster: Cluster, device: torch.device) -> None:
        self.processes: list[RemoteProcess] = []
        self._cluster, self._device = cluster, device
        self._pending: list[Pending] = []

    @property
    def size(self) -> int:
        return len(self.processes)

    def start(self, setups: Sequence[Mapping[str, Any]]) -> None:
        self.processes = [
            self._cluster.launch("rank", number, restarts=0, lost=LearnerLostError) for number in range(len(setups))
        ]
        address: str | None = self.processes[0].begin("address").data()  # None if it died, which receive() reports
        local = {
            "store": f"tcp://{address}",
            "folder": None,
            "threads": self._cluster.config.ray.cpus,
            "device": str(self._device),
        }
        self._pending = [
            process.begin("begin", encode({**setup, **local}))
            for process, setup in zip(self.processes, setups, strict=True)
        ]

    def send(self, request: bytes) -> set[int]:
        self._pending = [process.begin("ask", request) for process in self.processes]
        return set()  # receive() reports dead ranks

    def receive(self, silent: Collection[int], seconds: float) -> dict[int, bytes | None]:
        waiting = sorted(silent)
        ready = self._cluster.first_of([self._pending[rank] for rank in waiting], seconds)
        return {waiting[index]: self._pending[waiting[index]].data() for index in ready}

    def exit_reason(self, rank: int) -> str:
        return f"is gone ({self.processes[rank].reason()})"

    def exported(self) -> Mapping[str, torch.Tensor]:
        return RemoteWeights(self._cluster, self.processes[0].keep())

    def end(self) -> None:
        for process in self.processes:
            process.end()
        self.processes, self._pending = [], []

    def close(self) -> None:
        """Do nothing, because ended ranks leave no resources."""


def cluster_ranks(cluster: Cluster, device: torch.device) -> RankPool:
    """Return a pool of ranks on a cluster, on devices of the kind of ``device``."""
    return RankPool(RemoteRanks(cluster, torch.device(device.type)), cluster.seconds)
