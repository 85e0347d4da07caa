"""New weights for a run's vLLM servers: they are packed once and sent to all; what follows if a server refuses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

import torch
from safetensors import SafetensorError

from rlcore.errors import SamplingError
from rlcore.sampling.vllm.client import ControlGroup, EngineControl
from rlcore.sampling.vllm.process import ServerSpec
from rlcore.sampling.vllm.transfer import Transfer, open_transfer
from rlcore.sampling.vllm.weights import Weights, checkpoint_shapes, discard, pack

ADAPTER = "policy"  # the name under which the servers know the adapter
_FAULTS = (OSError, RuntimeError, SamplingError)


class Server(Protocol):
    """A server as the sync sees it; ``control`` is a new one after each start of it."""

    control: EngineControl
    served: Weights
    policy_version: int

    def is_alive(self) -> bool:
        """Whether it answers, and says that its engine runs."""
        ...

    def start(self) -> None:
        """Start the server again, with the weights that it served last."""
        ...


class WeightSync:
    """Brings weights to ``servers``, all of which serve the checkpoint that ``spec`` names.

    All servers read the same file. Where tensors are sent instead, this process and all workers form one group,
    because NCCL warns of several groups that several threads drive.
    """

    def __init__(self, servers: Sequence[Server], spec: ServerSpec) -> None:
        self._servers, self._spec = tuple(servers), spec
        self._shapes = checkpoint_shapes(spec.model)
        self._numbers = itertools.count()
        self._served = Weights(path=spec.model)
        self._transfer: Transfer | None = None
        self._met: tuple[EngineControl, ...] = ()  # the servers that the transfer was opened for

    def begin(self) -> None:
        """Send the checkpoint, as version 0, to servers that ran before this process: they may serve anything.

        Raises:
            SamplingError: a server refused it.
        """
        if self._spec.url:
            self._publish(self._served, 0)

    def send(self, state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        """Pause the servers, update their weights, drop the prefix cache, resume.

        The file of the weights stays until the next update, because a server that dies gets it again. If there is no
        file, such a server gets the trainer's own weights. One that has died since it was last asked is started first.
        Where one dies while it loads, all start again, and are sent the weights once more.

        Raises:
            SamplingError: the names or shapes differ, or a server refused. All then serve what they served before.
        """
        path = self._spec.exchange / str(next(self._numbers))  # a version may be sent twice
        try:
            weights = pack(state, path, spec=self._spec, shapes=self._shapes)
        except (OSError, SafetensorError) as error:
            discard(path)
            raise SamplingError(f"the weights did not reach the engine: {error}", where=str(path)) from error
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
            raise SamplingError(f"the weights did not reach the engine: {error}", where=str(path)) from error
        old, self._served = self._served, weights if weights.is_live_alone else replace(weights, live=None)
        for server in self._servers:
            server.served, server.policy_version = self._served, policy_version
        self._discard(old)

    def close(self) -> None:
        """Remove the file of the weights that are served."""
        self._discard(self._served)

    def _publish(self, weights: Weights, policy_version: int) -> None:
        group = ControlGroup([server.control for server in self._servers])
        publish(group, weights, policy_version, lambda each: self._opened(group).send(each))

    def _opened(self, group: ControlGroup) -> Transfer:
        """The transport to the servers. It is opened at its first use, and again after a server was restarted."""
        if self._transfer is None or group.members != self._met:
            if self._transfer is not None and self._spec.transfer != "file":
                group.ask("/shutdown_weight_transfer_engine", {})
            self._transfer = open_transfer(self._spec.transfer, group, num_tensors=len(self._shapes))
            self._met = group.members
        return self._transfer

    def _reload_previous(self) -> None:
        """Start every server again, because it may be paused, or hold a part of the new weights.

        Raises:
            SamplingError: the old weights no longer exist, or the servers are not ours to start.
        """
        if self._served.is_live_alone:
            self._served = replace(self._served, live=None)  # the trainer's weights are the new ones by now
            for server in self._servers:
                server.served = self._served
        self._restart(self._servers)

    def _restart(self, servers: Sequence[Server]) -> None:
        """Start them all at the same time."""
        with ThreadPoolExecutor(max(1, len(servers))) as threads:
            list(threads.map(lambda server: server.start(), servers))

    def _discard(self, weights: Weights) -> None:
        if weights.path != self._spec.model:
            discard(weights.path)


def publish(group: ControlGroup, weights: Weights, policy_version: int, send: Callable[[Weights], None]) -> None:
    """Serve ``weights`` from now on. ``send`` brings them to the servers; an adapter is read by the servers themselves.

    Running requests wait (mode ``keep``). They go on with the new weights, and their keys and values are computed anew.

    Raises:
        SamplingError: a server refused. It may be paused, and hold a part of the weights.
    """
    group.ask("/pause?mode=keep", {})
    if weights.is_adapter:  # it replaces the one before, and requests under way go on with it
        adapter = {"lora_name": ADAPTER, "lora_path": str(weights.path.resolve()), "load_inplace": True}
        group.ask("/v1/load_lora_adapter", adapter)
    else:
        send(weights)
    for answer in group.ask("/reset_prefix_cache?reset_running_requests=true", {}):
        if not answer["success"]:
            raise SamplingError("the engine keeps the prefix cache of the old weights")
    group.ask("/update_weight_version", {"new_version": str(policy_version)})
    group.ask("/resume", {})
