"""Weight sync to a run's vLLM servers: pack once, send to all, recover if a server refuses."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch
from safetensors import SafetensorError

from rlcore.errors import SamplingError
from rlcore.hardware.out_of_memory import empty_cache
from rlcore.sampling.vllm.client import ControlGroup, EngineControl
from rlcore.sampling.vllm.process import ServerSpec
from rlcore.sampling.vllm.weights import Weights, checkpoint_shapes, discard, pack

ADAPTER = "policy"  # name of the adapter on the servers
WEIGHTS = "weights"  # vLLM's tag of the memory of weights
_FAULTS = (OSError, SamplingError)


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
    """Weight sync to ``servers``, all of which serve the checkpoint that ``spec`` names, by one file for all."""

    def __init__(self, servers: Sequence[Server], spec: ServerSpec) -> None:
        self._servers, self._spec = tuple(servers), spec
        self._shapes = checkpoint_shapes(spec.model)
        self._numbers = itertools.count()
        self._served = Weights(path=spec.model)

    def begin(self) -> None:
        """Send the checkpoint, as version 0, to external servers, which may serve any weights.

        Raises:
            SamplingError: A server refused it.
        """
        if self._spec.url:
            self._publish(self._served, 0)

    def send(self, state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        """Pause the servers, update their weights, drop the prefix cache, resume. Sleeping ones get their memory first.

        The weight file stays until the next update, because a server that dies reads it again. A dead server is
        restarted first. If a server dies while it loads, all are restarted and the weights are sent again.

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
        old, self._served = self._served, weights
        for server in self._servers:
            server.served, server.policy_version = self._served, policy_version
        self._discard(old)

    def close(self) -> None:
        """Remove the file of the served weights."""
        self._discard(self._served)

    def _publish(self, weights: Weights, policy_version: int) -> None:
        group = ControlGroup([server.control for server in self._servers])
        self._wake([server for server in self._servers if WEIGHTS in server.asleep])
        publish(group, weights, policy_version, num_tensors=len(self._shapes))

    def _wake(self, servers: Sequence[Server]) -> None:
        """Allocate the weights of sleeping servers. Their caches follow when the new weights are verified."""
        if servers:
            empty_cache()  # they allocate outside of this process
            ControlGroup([server.control for server in servers]).ask(f"/wake_up?tags={WEIGHTS}", {})
        for server in servers:
            server.asleep = tuple(tag for tag in server.asleep if tag != WEIGHTS)

    def _reload_previous(self) -> None:
        """Restart every server, because it may be paused or hold a part of the new weights.

        Raises:
            SamplingError: A server is external.
        """
        self._restart(self._servers)

    def _restart(self, servers: Sequence[Server]) -> None:
        with ThreadPoolExecutor(max(1, len(servers))) as threads:
            list(threads.map(lambda server: server.start(), servers))

    def _discard(self, weights: Weights) -> None:
        if weights.path != self._spec.model:
            discard(weights.path)


def publish(group: ControlGroup, weights: Weights, policy_version: int, *, num_tensors: int) -> None:
    """Serve ``weights``, of ``num_tensors`` tensors, from now on.

    Running requests wait (mode ``keep``) and continue with the new weights and recomputed keys and values.

    Raises:
        SamplingError: A server refused. It may be paused, and hold a part of the weights.
    """
    group.ask("/pause?mode=keep", {})
    path = str(weights.path.resolve())
    if weights.is_adapter:  # it replaces the previous one, also for running requests
        group.ask("/v1/load_lora_adapter", {"lora_name": ADAPTER, "lora_path": path, "load_inplace": True})
    else:
        for answer in group.ask("/collective_rpc", {"method": "receive_weights", "args": [path]}):
            if any(result["tensors"] != num_tensors for result in answer["results"]):
                raise SamplingError(f"a worker read tensors that were not sent: {answer['results']}", where=path)
    for answer in group.ask("/reset_prefix_cache?reset_running_requests=true", {}):
        if not answer["success"]:
            raise SamplingError("the engine did not drop the prefix cache of the old weights")
    group.ask("/update_weight_version", {"new_version": str(policy_version)})
    group.ask("/resume", {})
