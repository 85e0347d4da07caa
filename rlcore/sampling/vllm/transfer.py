"""Transports of new weights from the trainer to the workers of vLLM servers.

``file``, and ``shared_memory``, a file in memory, need only rlcore's worker. The others use vLLM's weight-transfer
API: a handshake, then per update a start, the weights and a finish, while the engine is paused. ``nccl`` (between GPUs)
and ``ipc`` (on one GPU) are vLLM's transports. They need vLLM, which has the senders, in the trainer's environment too.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from rlcore.config import TransferKind
from rlcore.errors import SamplingError
from rlcore.sampling.vllm.client import ControlGroup, in_background
from rlcore.sampling.vllm.process import BY_FILE
from rlcore.sampling.vllm.weights import TensorMeta, Weights
from rlcore.sampling.vllm.worker.gloo import broadcast, join_group, open_store, own_address

Transfer = Callable[[Weights], None]
"""Send the weights and return when every worker has loaded them; SamplingError if a server refuses."""


def open_transfer(kind: TransferKind, group: ControlGroup, *, num_tensors: int) -> Transfer:
    """Open a transport to running servers. Reopen one with a handshake after a server was restarted.

    Raises:
        SamplingError: A server was started for another transport, or servers are reached by different interfaces.
    """
    if kind in BY_FILE:
        return partial(send_file, group, num_tensors=num_tensors)
    if kind == "gloo":
        return GlooTransfer(group).send
    return partial(send_direct, *_open_direct(kind, group))


def world_sizes(group: ControlGroup) -> list[int]:
    """Return the number of workers of each server."""
    return [answer["world_size"] for answer in group.ask("/get_world_size", None)]


def rendezvous_host(group: ControlGroup) -> str:
    """Return this machine's address by which all servers reach it.

    Raises:
        SamplingError: There is no such address.
    """
    hosts = {own_address(member.address[:2]) for member in group.members}
    if len(hosts) > 1:
        raise SamplingError(
            f"the servers are reached by different interfaces: {', '.join(sorted(hosts))}",
            where="engine.urls",
            fix='name all by addresses of one network, or set engine.weight_transfer = "file"',
        )
    return hosts.pop()


def send_file(group: ControlGroup, weights: Weights, *, num_tensors: int) -> None:
    """Send the path of a file, on disk or in memory, that the workers read."""
    path = str(weights.stored().resolve())
    for answer in group.ask("/collective_rpc", {"method": "receive_weights", "args": [path]}):
        if any(result["tensors"] != num_tensors for result in answer["results"]):
            raise SamplingError(f"a worker read tensors that were not sent: {answer['results']}", where=path)


class GlooTransfer:
    """Transport over TCP, one tensor after the other to every worker concurrently."""

    def __init__(self, group: ControlGroup) -> None:
        self._group, sizes = group, world_sizes(group)
        host, size = rendezvous_host(group), 1 + sum(sizes)
        self._store = open_store(host, size)  # the group needs the store while it exists
        meeting = in_background(lambda: join_group(self._store, 0, size, host=host))
        where = {"host": host, "port": self._store.port, "size": size}
        firsts = [1 + sum(sizes[:number]) for number in range(len(sizes))]  # the trainer is rank 0
        payloads = [{"init_info": {**where, "first_rank": first}} for first in firsts]
        group.ask_each("/init_weight_transfer_engine", payloads)
        self._members = meeting.result()

    def send(self, weights: Weights) -> None:
        """Send; if a server refuses, wait until server and group have ended."""
        names, dtypes, shapes = zip(*weights.metadata(), strict=True)
        update = {"names": names, "dtypes": [str(dtype).removeprefix("torch.") for dtype in dtypes], "shapes": shapes}
        self._group.ask("/start_weight_update", {})
        sending = in_background(lambda: self._broadcast(weights))
        self._group.ask("/update_weights", {"update_info": update})
        sending.result()
        self._group.ask("/finish_weight_update", {})

    def _broadcast(self, weights: Weights) -> None:
        for _, tensor in weights.tensors():
            broadcast(self._members, tensor.cpu())


class WeightSource:
    """Weights as vLLM's senders read them: first the metadata of all tensors, then the tensors on the GPU."""

    def __init__(self, device: torch.device) -> None:
        self.weights: Weights | None = None
        self._device = device

    def metadata(self) -> list[TensorMeta]:
        assert self.weights is not None
        return self.weights.metadata()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        assert self.weights is not None
        for name, tensor in self.weights.tensors():
            yield name, tensor.to(self._device).contiguous()


class ControlClient:
    """Client for vLLM's senders. Several servers appear as one group.

    ``sizes``: workers of each server. vLLM counts ranks within one server, so further servers' are offset.
    """

    def __init__(self, group: ControlGroup, sizes: Sequence[int]) -> None:
        self._group, self._sizes = group, sizes

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        payloads = [{"init_info": dict(init_info)} for _ in self._sizes]
        if "rank_offset" in init_info:
            for number, each in enumerate(payloads):
                each["init_info"]["rank_offset"] += sum(self._sizes[:number])
        self._group.ask_each("/init_weight_transfer_engine", payloads)

    def start_weight_update(self) -> None:
        self._group.ask("/start_weight_update", {})

    def update_weights(self, update_info: Any) -> None:
        """Announce the tensors. vLLM itself encodes GPU memory handles as text."""
        from vllm.distributed.weight_transfer.clients import _json_safe_update_payload

        self._group.ask("/update_weights", {"update_info": _json_safe_update_payload(update_info)})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Finish an update, whose caller sets the version."""
        self._group.ask("/finish_weight_update", {})


def _open_direct(kind: TransferKind, group: ControlGroup) -> tuple[Any, WeightSource]:
    """Return vLLM's sender of ``nccl`` or ``ipc`` after its handshake, and what it reads."""
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

    source, sizes = WeightSource(torch.device("cuda", torch.cuda.current_device())), world_sizes(group)
    sender = WeightTransferTrainerFactory.trainer_init(
        init_info(kind, rendezvous_host(group), sizes), client=ControlClient(group, sizes), source=source
    )
    return sender, source


def send_direct(sender: Any, source: WeightSource, weights: Weights) -> None:
    """Send by vLLM's ``sender``, which reads ``source``."""
    source.weights = weights
    sender.send_weights()
    source.weights = None


def init_info(kind: str, host: str, sizes: Sequence[int]) -> Any:
    """Return the arguments of vLLM's sender; for NCCL, the rendezvous and the number of processes."""
    if kind == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(rank=0, packed=True)
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    return NCCLTrainerInitInfo(rank=0, master_address=host, master_port=_free_port(host), world_size=1 + sum(sizes))


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
