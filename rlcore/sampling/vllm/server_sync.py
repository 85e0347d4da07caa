"""Weight sync to a run's vLLM servers: pack once, send to all, recover if a server refuses."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError

from rlcore.config import TransferKind
from rlcore.errors import SamplingError
from rlcore.hardware.out_of_memory import empty_cache
from rlcore.sampling.vllm.client import ControlGroup, EngineControl
from rlcore.sampling.vllm.process import ServerSpec, free_port
from rlcore.sampling.vllm.weights import Weights, checkpoint_shapes, discard, pack

ADAPTER = "policy"  # name of the adapter on the servers
WEIGHTS = "weights"  # vLLM's tag of the memory of weights
_FAULTS = (OSError, RuntimeError, SamplingError)

Send = Callable[[Weights], None]
"""Transport: sends the weights, and returns when every worker has loaded them. Raises SamplingError if one refuses."""


def open_transfer(kind: TransferKind, group: ControlGroup, *, num_tensors: int) -> Send:
    """Open a transport to running servers with a handshake. Reopen it after a server was restarted.

    ``nccl`` and ``ipc`` need vLLM in the trainer's environment too, because it has the sender classes.

    Raises:
        SamplingError: A server was started for another transport, or servers are reached by different interfaces.
    """
    if kind == "file":
        return partial(send_file, group, num_tensors)
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

    sizes = world_sizes(group)
    source = WeightSource(torch.device("cuda", torch.cuda.current_device()))
    sender = WeightTransferTrainerFactory.trainer_init(
        init_info(kind, rendezvous_host(group), sizes), client=ControlClient(group, sizes), source=source
    )
    return partial(send_direct, sender, source)


def send_file(group: ControlGroup, num_tensors: int, weights: Weights) -> None:
    """Send the path of a file that the workers read; needs only rlcore's worker in the server."""
    path = str(weights.stored().resolve())
    for answer in group.ask("/collective_rpc", {"method": "receive_weights", "args": [path]}):
        if any(result["tensors"] != num_tensors for result in answer["results"]):
            raise SamplingError(f"a worker read tensors that were not sent: {answer['results']}", where=path)


def send_direct(sender: Any, source: WeightSource, weights: Weights) -> None:
    """Send by one of vLLM's senders."""
    source.weights = weights
    sender.send_weights()
    source.weights = None


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


def own_address(peer: tuple[str, int]) -> str:
    """Return this machine's address on the route to ``peer``; the loopback address for a local peer."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(peer)  # sends nothing
        address: str = probe.getsockname()[0]
        return address


class TensorMeta(NamedTuple):
    """Metadata of a tensor, which vLLM needs before it is sent."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource:
    """Weights as vLLM's senders read them: first the metadata of all tensors, then the tensors on the GPU."""

    def __init__(self, device: torch.device) -> None:
        self.weights: Weights | None = None
        self._device = device

    def metadata(self) -> list[TensorMeta]:
        """Return name, type and shape of every tensor, in sending order."""
        assert self.weights is not None
        return [TensorMeta(name, dtype, shape) for name, dtype, shape in self.weights.listed()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        assert self.weights is not None
        for name, tensor in self.weights.tensors():
            yield name, tensor.to(self._device).contiguous()


class ControlClient:
    """Client for vLLM's senders. Several servers appear as one group.

    ``sizes`` is the number of workers of each server. vLLM counts ranks within one server, so the ranks of each further
    server are offset.
    """

    def __init__(self, group: ControlGroup, sizes: Sequence[int]) -> None:
        self._group, self._sizes = group, sizes

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Send the handshake."""
        payloads = [{"init_info": dict(init_info)} for _ in self._sizes]
        if "rank_offset" in init_info:
            for number, each in enumerate(payloads):
                each["init_info"]["rank_offset"] += sum(self._sizes[:number])
        self._group.ask_each("/init_weight_transfer_engine", payloads)

    def start_weight_update(self) -> None:
        """Start an update before the first tensor."""
        self._group.ask("/start_weight_update", {})

    def update_weights(self, update_info: Any) -> None:
        """Announce the tensors. vLLM itself encodes GPU memory handles as text."""
        from vllm.distributed.weight_transfer.clients import _json_safe_update_payload

        self._group.ask("/update_weights", {"update_info": _json_safe_update_payload(update_info)})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Finish an update after the last tensor. The caller of the update sets the version."""
        self._group.ask("/finish_weight_update", {})


def init_info(kind: str, host: str, sizes: Sequence[int]) -> Any:
    """Return the arguments of vLLM's sender; for NCCL, the rendezvous and the number of processes."""
    if kind == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(rank=0, packed=True)
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    return NCCLTrainerInitInfo(rank=0, master_address=host, master_port=free_port(host), world_size=1 + sum(sizes))


class Server(Protocol):
    """Server of a weight sync. ``control`` changes with each restart.

    ``asleep``: vLLM's tags of the memory that it has released on a shared GPU.
    """

    control: EngineControl
    served: Weights
    policy_version: int
    asleep: tuple[str, ...]

    def is_alive(self) -> bool:
        """Return True if it answers and reports a running engine."""
        ...

    def start(self) -> None:
        """Restart the server with the weights that it served last."""
        ...


class WeightSync:
    """Weight sync to ``servers``, all of which serve the checkpoint that ``spec`` names.

    All servers read the same file. If tensors are sent instead, this process and all workers form one group, because
    NCCL warns of several groups driven by several threads.
    """

    def __init__(self, servers: Sequence[Server], spec: ServerSpec) -> None:
        self._servers, self._spec = tuple(servers), spec
        self._shapes = checkpoint_shapes(spec.model)
        self._numbers = itertools.count()
        self._served = Weights(path=spec.model)
        self._transfer: Send | None = None
        self._met: tuple[EngineControl, ...] = ()  # servers of the open transfer

    def begin(self) -> None:
        """Send the checkpoint, as version 0, to external servers, which may serve any weights.

        Raises:
            SamplingError: A server refused it.
        """
        if self._spec.url:
            self._publish(self._served, 0)

    def send(self, state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        """Pause the servers, update their weights, drop the prefix cache, resume. Sleeping ones get their memory first.

        The weight file stays until the next update, because a server that dies reads it again. Without a file, such a
        server gets the trainer's current weights. A dead server is restarted first. If a server dies while it loads,
        all are restarted and the weights are sent again.

        Raises:
            SamplingError: Names or shapes differ, or a server refused. All servers then have the previous weights, or
                are still asleep.
        """
        path = self._spec.weight_dir / str(next(self._numbers))  # a version may be sent twice
        try:
            weights = pack(state, path, spec=self._spec, shapes=self._shapes)
        except (OSError, SafetensorError) as error:
            discard(path)
            raise SamplingError(f"the weights could not be sent to the engine: {error}", where=str(path)) from error
        try:
            self._restart([server for server in self._servers if not server.is_alive()])
            try:
                self._publish(weights, policy_version)
            except _FAULTS:
                if all(server.is_alive() for server in self._servers):
                    raise
                self._reload_previous()
                self._publish(weights, policy_version)
        except _FAULTS as error:
            discard(path)
            self._reload_previous()
            raise SamplingError(f"the weights could not be sent to the engine: {error}", where=str(path)) from error
        old, self._served = self._served, weights if weights.is_live_alone else replace(weights, live=None)
        for server in self._servers:
            server.served, server.policy_version = self._served, policy_version
        self._discard(old)

    def close(self) -> None:
        """Remove the file of the served weights."""
        self._discard(self._served)

    def _publish(self, weights: Weights, policy_version: int) -> None:
        group = ControlGroup([server.control for server in self._servers])
        self._wake([server for server in self._servers if WEIGHTS in server.asleep])
        publish(group, weights, policy_version, lambda each: self._opened(group)(each))

    def _wake(self, servers: Sequence[Server]) -> None:
        """Allocate the weights of sleeping servers. Their caches follow when the new weights are verified."""
        if servers:
            empty_cache()  # they allocate outside of this process
            ControlGroup([server.control for server in servers]).ask(f"/wake_up?tags={WEIGHTS}", {})
        for server in servers:
            server.asleep = tuple(tag for tag in server.asleep if tag != WEIGHTS)

    def _opened(self, group: ControlGroup) -> Send:
        """Return the transport to the servers, reopened after a server was restarted."""
        if self._transfer is None or group.members != self._met:
            if self._transfer is not None and self._spec.transfer != "file":
                group.ask("/shutdown_weight_transfer_engine", {})
            self._transfer = open_transfer(self._spec.transfer, group, num_tensors=len(self._shapes))
            self._met = group.members
        return self._transfer

    def _reload_previous(self) -> None:
        """Restart every server, because it may be paused or hold a part of the new weights.

        Raises:
            SamplingError: The previous weights no longer exist, or a server is external.
        """
        if self._served.is_live_alone:
            self._served = replace(self._served, live=None)  # the trainer has the new weights now
            for server in self._servers:
                server.served = self._served
        self._restart(self._servers)

    def _restart(self, servers: Sequence[Server]) -> None:
        with ThreadPoolExecutor(max(1, len(servers))) as threads:
            list(threads.map(lambda server: server.start(), servers))

    def _discard(self, weights: Weights) -> None:
        if weights.path != self._spec.model:
            discard(weights.path)


def publish(group: ControlGroup, weights: Weights, policy_version: int, send: Send) -> None:
    """Serve ``weights`` from now on. ``send`` transfers them, but servers read an adapter themselves.

    Running requests wait (mode ``keep``) and continue with the new weights and recomputed keys and values.

    Raises:
        SamplingError: A server refused. It may be paused, and hold a part of the weights.
    """
    group.ask("/pause?mode=keep", {})
    if weights.is_adapter:  # it replaces the previous one, also for running requests
        adapter = {"lora_name": ADAPTER, "lora_path": str(weights.path.resolve()), "load_inplace": True}
        group.ask("/v1/load_lora_adapter", adapter)
    else:
        send(weights)
    for answer in group.ask("/reset_prefix_cache?reset_running_requests=true", {}):
        if not answer["success"]:
            raise SamplingError("the engine did not drop the prefix cache of the old weights")
    group.ask("/update_weight_version", {"new_version": str(policy_version)})
    group.ask("/resume", {})
