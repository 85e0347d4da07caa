"""Weight sync to a run's vLLM servers: pack once, send to all, recover if a server refuses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

import torch
from safetensors import SafetensorError

from rlcore.errors import SamplingError
from rlcore.hardware.out_of_memory import empty_cache
from rlcore.sampling.vllm.client import ControlGroup, EngineControl
from rlcore.sampling.vllm.process import BY_FILE, ServerSpec
from rlcore.sampling.vllm.transfer import Transfer, open_transfer
from rlcore.sampling.vllm.weights import Weights, checkpoint_shapes, discard, pack

ADAPTER = "policy"  # name of the adapter on the servers
WEIGHTS = "weights"  # vLLM's tag of the memory of weights
_FAULTS = (OSError, RuntimeError, SamplingError)


class Server(Protocol):
    """Server of a weight sync. ``control`` changes with each restart.

    ``asleep``: vLLM's tags of the memory that it has released on a shared GPU.
    """

    control: EngineControl
    served: Weights
    policy_version: int
    asleep: tuple[str, ...]

    def is_alive(self) -> bool: ...

    def start(self) -> None:
        """Restart the server with the weights that it served last."""
        ...


class WeightSync:
    """Weight sync to ``servers``, all of which serve the checkpoint that ``spec`` names.

    Tensors are sent in one group of this process and all workers: NCCL warns of several groups driven by several
    threads.
    """

    def __init__(self, servers: Sequence[Server], spec: ServerSpec) -> None:
        self._servers, self._spec = tuple(servers), spec
        self._shapes = checkpoint_shapes(spec.model)
        self._numbers = itertools.count()
        self._served = Weights(path=spec.model)
        self._transfer: Transfer | None = None
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

        The file stays until the next update for servers that die; without it they get the trainer's current weights. A
        dead server is restarted first. If one dies while it loads, all are restarted and get the weights again.

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
        self._discard(self._served)

    def _publish(self, weights: Weights, policy_version: int) -> None:
        group = ControlGroup([server.control for server in self._servers])
        self._wake([server for server in self._servers if WEIGHTS in server.asleep])
        publish(group, weights, policy_version, lambda each: self._opened(group)(each))

    def _wake(self, servers: Sequence[Server]) -> None:
        """Allocate the weights of sleeping servers; caches follow when new weights are verified."""
        if servers:
            empty_cache()  # they allocate outside of this process
            ControlGroup([server.control for server in servers]).ask(f"/wake_up?tags={WEIGHTS}", {})
        for server in servers:
            server.asleep = tuple(tag for tag in server.asleep if tag != WEIGHTS)

    def _opened(self, group: ControlGroup) -> Transfer:
        """Return the transport to the servers, reopened after a restart."""
        if self._transfer is None or group.members != self._met:
            if self._transfer is not None and self._spec.transfer not in BY_FILE:
                group.ask("/shutdown_weight_transfer_engine", {})
            self._transfer = open_transfer(self._spec.transfer, group, num_tensors=len(self._shapes))
            self._met = group.members
        return self._transfer

    def _reload_previous(self) -> None:
        """Restart every server: each may be paused or hold a part of the new weights."""
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


def publish(group: ControlGroup, weights: Weights, policy_version: int, send: Callable[[Weights], None]) -> None:
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
