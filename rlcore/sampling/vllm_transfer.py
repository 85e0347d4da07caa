"""The trainer's side of a weight update: the ways in which new weights reach the workers of vLLM servers.

``file`` needs nothing of the server but our worker. The others go through vLLM's weight-transfer API: a handshake, then
for each update start, the weights, finish. The engine is paused meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from rlcore.config import EngineConfig, TransferKind
from rlcore.errors import ConfigError, SamplingError
from rlcore.sampling.background import in_background
from rlcore.sampling.gloo_group import broadcast, join_group, open_store, own_address
from rlcore.sampling.vllm_control import ControlGroup
from rlcore.sampling.vllm_gpu import open_builtin
from rlcore.sampling.vllm_weights import DIRECT, Weights
from rlcore.sampling.weight_files import fits_in_memory


class Transfer(Protocol):
    """A way of the weights to a group of servers."""

    def send(self, weights: Weights) -> None:
        """Return when every worker has loaded them.

        Raises:
            SamplingError: the server refused.
        """
        ...


def choose_transfer(
    config: EngineConfig, device: torch.device, *, num_bytes: int, shares: Sequence[bool], can_send: bool
) -> TransferKind:
    """What ``auto`` means here, or what was named, where it can be; ``num_bytes`` are those of the weights.

    ``shares``: for each server of ours, whether it computes on the trainer's GPU. ``can_send``: vLLM, whose senders
    bring weights from GPU to GPU, is installed in this environment.

    Raises:
        ConfigError: from GPU to GPU where it cannot be, or through memory that is too short.
    """
    fits, name = fits_in_memory(num_bytes), config.transfer
    if name == "auto":
        if config.urls or config.exchange:
            return "file"
        if device.type == "cuda" and can_send and not any(shares):
            return "nccl"
        return "shared_memory" if fits else "file"
    if name in DIRECT:
        _check_direct(name, device, shares=shares, can_send=can_send)
    if name == "shared_memory" and not fits:
        raise ConfigError(
            f"/dev/shm has no room for three times {num_bytes / 2**20:.0f} MiB",
            where="engine.transfer",
            fix="take gloo, or file with a folder as engine.exchange",
        )
    return name


def _check_direct(name: TransferKind, device: torch.device, *, shares: Sequence[bool], can_send: bool) -> None:
    if device.type != "cuda":
        raise ConfigError(
            f"{name} sends weights from GPU to GPU, this run trains on {device.type}",
            where="engine.transfer",
            fix="take shared_memory on one machine, gloo between two; auto chooses",
        )
    if not can_send:
        raise ConfigError(
            f"{name} needs vLLM in the trainer's environment too, and it is not there",
            where="engine.transfer",
            fix="pip install 'rlcore[vllm]', or take shared_memory or gloo",
        )
    if name == "nccl" and any(shares):
        raise ConfigError(
            f"nccl cannot join two processes on one GPU, and replica {list(shares).index(True)} computes on the "
            "trainer's",
            where="engine.transfer",
            fix="take ipc, which is for one GPU, or name other GPUs in engine.gpus.devices",
        )
    if name == "ipc" and not all(shares):
        raise ConfigError(
            f"ipc hands over memory of one GPU, and replica {list(shares).index(False)} computes on another than the "
            "trainer's",
            where="engine.transfer",
            fix="take nccl, or name the trainer's GPU in engine.gpus.devices",
        )


def open_transfer(kind: TransferKind, group: ControlGroup, *, num_tensors: int) -> Transfer:
    """Shake hands with servers that run; once for each start of one.

    Raises:
        SamplingError: one was started for another way, or they are reached by different interfaces.
    """
    if kind == "file":
        return FileTransfer(group, num_tensors)
    if kind == "shared_memory":
        return SharedMemoryTransfer(group, num_tensors)
    if kind == "gloo":
        return GlooTransfer(group)
    return open_builtin(kind, group, host=meeting_host(group), sizes=world_sizes(group))


def world_sizes(group: ControlGroup) -> list[int]:
    """How many workers each server has."""
    return [answer["world_size"] for answer in group.ask("/get_world_size", None)]


def meeting_host(group: ControlGroup) -> str:
    """The address of this machine by which all servers reach it.

    Raises:
        SamplingError: there is none.
    """
    hosts = {own_address(member.address) for member in group.members}
    if len(hosts) > 1:
        raise SamplingError(
            f"the servers are reached by different interfaces: {', '.join(sorted(hosts))}",
            where="engine.urls",
            fix="name all of them by addresses of one network, or take transfer = 'file'",
        )
    return hosts.pop()


class FileTransfer:
    """The path of a file that the workers read; the fallback, which any server with our worker takes."""

    def __init__(self, group: ControlGroup, num_tensors: int) -> None:
        self._group, self._num_tensors = group, num_tensors

    def send(self, weights: Weights) -> None:
        """See :class:`Transfer`."""
        path = str(weights.stored().resolve())
        for answer in self._group.ask("/collective_rpc", {"method": "receive_weights", "args": [path]}):
            if any(result["tensors"] != self._num_tensors for result in answer["results"]):
                raise SamplingError(f"a worker read other tensors than were sent: {answer['results']}", where=path)


class SharedMemoryTransfer:
    """A file in memory; its path and the number of its tensors are all that is sent."""

    def __init__(self, group: ControlGroup, num_tensors: int) -> None:
        self._group, self._num_tensors = group, num_tensors
        group.ask("/init_weight_transfer_engine", {"init_info": {}})

    def send(self, weights: Weights) -> None:
        """See :class:`Transfer`."""
        update = {"path": str(weights.stored().resolve()), "num_tensors": self._num_tensors}
        self._group.ask("/start_weight_update", {})
        self._group.ask("/update_weights", {"update_info": update})
        self._group.ask("/finish_weight_update", {})


class GlooTransfer:
    """One tensor after the other over TCP, to every worker of every server at once."""

    def __init__(self, group: ControlGroup) -> None:
        self._group, sizes = group, world_sizes(group)
        host, size = meeting_host(group), 1 + sum(sizes)
        self._store = open_store(host, size)  # kept: it serves as long as the group lives
        meeting = in_background(lambda: join_group(self._store, 0, size, host=host))
        where = {"host": host, "port": self._store.port, "size": size}
        told = [{"init_info": {**where, "first_rank": first}} for first in first_ranks(sizes)]
        group.tell("/init_weight_transfer_engine", told)
        self._members = meeting.result()

    def send(self, weights: Weights) -> None:
        """See :class:`Transfer`. A server that refuses leaves the sender waiting: the group ends with the server."""
        names, dtypes, shapes = zip(*weights.listed(), strict=True)
        update = {"names": names, "dtypes": [str(dtype).removeprefix("torch.") for dtype in dtypes], "shapes": shapes}
        self._group.ask("/start_weight_update", {})
        sending = in_background(lambda: self._broadcast(weights))
        self._group.ask("/update_weights", {"update_info": update})
        sending.result()
        self._group.ask("/finish_weight_update", {})

    def _broadcast(self, weights: Weights) -> None:
        for _, tensor in weights.tensors():
            broadcast(self._members, tensor.cpu())


def first_ranks(sizes: Sequence[int]) -> list[int]:
    """The rank of each server's first worker, behind the trainer's rank 0 and the servers before it."""
    return [1 + sum(sizes[:number]) for number in range(len(sizes))]
