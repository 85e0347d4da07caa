"""The trainer's side of a weight update: the transports that bring new weights to the workers of vLLM servers.

``file`` needs only our worker in the server. The others use vLLM's weight-transfer API: first a handshake, then for
each update a start, the weights and a finish. The engine is paused meanwhile. ``nccl`` (between GPUs) and ``ipc`` (on
one GPU) are vLLM's own transports. They need vLLM in the trainer's environment too, because the trainer sends through
its classes.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rlcore.config import TransferKind
from rlcore.errors import SamplingError
from rlcore.sampling.vllm.client import ControlGroup, in_background
from rlcore.sampling.vllm.weights import Weights
from rlcore.sampling.vllm.worker.gloo import broadcast, join_group, open_store, own_address


class Transfer(Protocol):
    """A transport of weights to a group of servers."""

    def send(self, weights: Weights) -> None:
        """Return when every worker has loaded them.

        Raises:
            SamplingError: the server refused.
        """
        ...


def open_transfer(kind: TransferKind, group: ControlGroup, *, num_tensors: int) -> Transfer:
    """A transport to running servers, after the handshake. It has to be opened again when one of them was restarted.

    Raises:
        SamplingError: a server was started for another transport, or they are reached by different interfaces.
    """
    if kind == "file":
        return FileTransfer(group, num_tensors)
    if kind == "shared_memory":
        return SharedMemoryTransfer(group, num_tensors)
    if kind == "gloo":
        return GlooTransfer(group)
    return open_builtin(kind, group, host=rendezvous_host(group), sizes=world_sizes(group))


def world_sizes(group: ControlGroup) -> list[int]:
    """The number of workers of each server."""
    return [answer["world_size"] for answer in group.ask("/get_world_size", None)]


def rendezvous_host(group: ControlGroup) -> str:
    """The address of this machine by which all servers reach it.

    Raises:
        SamplingError: there is none.
    """
    hosts = {own_address(member.address[:2]) for member in group.members}
    if len(hosts) > 1:
        raise SamplingError(
            f"the servers are reached by different interfaces: {', '.join(sorted(hosts))}",
            where="engine.urls",
            fix="name all of them by addresses of one network, or take transfer = 'file'",
        )
    return hosts.pop()


class FileTransfer:
    """Sends the path of a file that the workers read. Any server with our worker takes it, so it is the fallback."""

    def __init__(self, group: ControlGroup, num_tensors: int) -> None:
        self._group, self._num_tensors = group, num_tensors

    def send(self, weights: Weights) -> None:
        """See :class:`Transfer`."""
        path = str(weights.stored().resolve())
        for answer in self._group.ask("/collective_rpc", {"method": "receive_weights", "args": [path]}):
            if any(result["tensors"] != self._num_tensors for result in answer["results"]):
                raise SamplingError(f"a worker read other tensors than were sent: {answer['results']}", where=path)


class SharedMemoryTransfer:
    """Sends the path of a file in memory, and the number of its tensors."""

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
    """Sends one tensor after the other over TCP, to every worker of every server at once."""

    def __init__(self, group: ControlGroup) -> None:
        self._group, sizes = group, world_sizes(group)
        host, size = rendezvous_host(group), 1 + sum(sizes)
        self._store = open_store(host, size)  # kept, because the group needs it as long as it lives
        meeting = in_background(lambda: join_group(self._store, 0, size, host=host))
        where = {"host": host, "port": self._store.port, "size": size}
        told = [{"init_info": {**where, "first_rank": first}} for first in first_ranks(sizes)]
        group.tell("/init_weight_transfer_engine", told)
        self._members = meeting.result()

    def send(self, weights: Weights) -> None:
        """See :class:`Transfer`. If a server refuses, the sender waits until server and group have ended."""
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
    """The rank of each server's first worker. The trainer is rank 0, and the servers follow in order."""
    return [1 + sum(sizes[:number]) for number in range(len(sizes))]


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """What vLLM has to know of a tensor before it is sent."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource:
    """The weights as vLLM's senders read them: first a description of all tensors, then the tensors, on the GPU."""

    def __init__(self, device: torch.device) -> None:
        self.weights: Weights | None = None
        self._device = device

    def metadata(self) -> list[TensorMeta]:
        """Name, type and shape of every tensor, in the order in which they are sent."""
        assert self.weights is not None
        return [TensorMeta(name, dtype, shape) for name, dtype, shape in self.weights.listed()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        assert self.weights is not None
        for name, tensor in self.weights.tensors():
            yield name, tensor.to(self._device).contiguous()


class ControlClient:
    """The four calls that vLLM's senders make. Several servers look like one group to the sender.

    ``sizes``: the number of workers of each server. vLLM counts ranks within one server, so the ranks of each further
    server begin where those of the one before end.
    """

    def __init__(self, group: ControlGroup, sizes: Sequence[int]) -> None:
        self._group, self._sizes = group, sizes

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """The handshake."""
        told = [{"init_info": dict(init_info)} for _ in self._sizes]
        if "rank_offset" in init_info:
            for number, each in enumerate(told):
                each["init_info"]["rank_offset"] += sum(self._sizes[:number])
        self._group.tell("/init_weight_transfer_engine", told)

    def start_weight_update(self) -> None:
        """Before the first tensor."""
        self._group.ask("/start_weight_update", {})

    def update_weights(self, update_info: Any) -> None:
        """Announce what is sent. vLLM itself turns handles of GPU memory into text."""
        from vllm.distributed.weight_transfer.clients import _json_safe_update_payload

        self._group.ask("/update_weights", {"update_info": _json_safe_update_payload(update_info)})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """After the last tensor. Whoever asked for the update names the version."""
        self._group.ask("/finish_weight_update", {})


class BuiltInTransfer:
    """Sends by one of vLLM's own senders; see :class:`Transfer`."""

    def __init__(self, sender: Any, source: WeightSource) -> None:
        self._sender, self._source = sender, source

    def send(self, weights: Weights) -> None:
        """See :class:`Transfer`."""
        self._source.weights = weights
        self._sender.send_weights()
        self._source.weights = None


def open_builtin(kind: str, group: ControlGroup, *, host: str, sizes: Sequence[int]) -> BuiltInTransfer:
    """A transport by ``nccl`` or ``ipc``, after the handshake; ``host``: this machine's address, as servers reach it.

    Raises:
        SamplingError: a server refused.
    """
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

    source = WeightSource(torch.device("cuda", torch.cuda.current_device()))
    sender = WeightTransferTrainerFactory.trainer_init(
        init_info(kind, host, sizes), client=ControlClient(group, sizes), source=source
    )
    return BuiltInTransfer(sender, source)


def init_info(kind: str, host: str, sizes: Sequence[int]) -> Any:
    """What vLLM's sender is told. For NCCL: where all meet, and how many they are (this process and every worker)."""
    if kind == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(rank=0, packed=True)
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    return NCCLTrainerInitInfo(rank=0, master_address=host, master_port=_free_port(host), world_size=1 + sum(sizes))


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
