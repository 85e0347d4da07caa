"""The trainer's side of a weight update: the ways in which new weights reach the workers of one vLLM server.

``file`` needs nothing of the server but our worker. The others go through vLLM's weight-transfer API: a handshake, then
for each update start, the weights, finish. The engine is paused meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from rlcore.config import EngineConfig, TransferKind
from rlcore.errors import ConfigError, SamplingError
from rlcore.sampling.gloo_group import broadcast, join_group, open_store, own_address
from rlcore.sampling.vllm_gpu import open_builtin
from rlcore.sampling.vllm_weights import DIRECT, Weights
from rlcore.sampling.weight_files import fits_in_memory

Ask = Callable[[str, Mapping[str, Any] | None], Any]  # a route of the server and what it is sent (None: GET)


class Transfer(Protocol):
    """A way of the weights to one server."""

    def send(self, weights: Weights) -> None:
        """Return when every worker has loaded them.

        Raises:
            SamplingError: the server refused.
        """
        ...


def choose_transfer(config: EngineConfig, device: torch.device, *, num_bytes: int) -> TransferKind:
    """What ``auto`` means here, or what was named, where it can be; ``num_bytes`` are those of all servers' weights.

    Raises:
        ConfigError: from GPU to GPU without a GPU, or through memory that is too short.
    """
    fits, name = fits_in_memory(num_bytes), config.transfer
    if name == "auto":
        return "shared_memory" if fits and not (config.urls or config.exchange) else "file"
    if name in DIRECT and device.type != "cuda":
        raise ConfigError(
            f"{name} sends weights from GPU to GPU, this run trains on {device.type}",
            where="sampling.engine.transfer",
            fix="take shared_memory on one machine, gloo between two; auto chooses",
        )
    if name == "shared_memory" and not fits:
        raise ConfigError(
            f"/dev/shm has no room for three times {num_bytes / 2**20:.0f} MiB",
            where="sampling.engine.transfer",
            fix="take gloo, or file with a folder as sampling.engine.exchange",
        )
    return name


def open_transfer(kind: TransferKind, ask: Ask, address: tuple[str, int], *, num_tensors: int) -> Transfer:
    """Shake hands with a server that runs; once for each start of it.

    Raises:
        SamplingError: it was started for another way, or vLLM is not installed here for ``nccl`` and ``ipc``.
    """
    if kind in DIRECT:
        return open_builtin(kind, ask, own_address(address))
    if kind == "gloo":
        return GlooTransfer(ask, address)
    return SharedMemoryTransfer(ask, num_tensors) if kind == "shared_memory" else FileTransfer(ask, num_tensors)


class FileTransfer:
    """The path of a file that the workers read; the fallback, which any server with our worker takes."""

    def __init__(self, ask: Ask, num_tensors: int) -> None:
        self._ask, self._num_tensors = ask, num_tensors

    def send(self, weights: Weights) -> None:
        """See :class:`Transfer`."""
        path = str(weights.path.resolve())
        answer = self._ask("/collective_rpc", {"method": "receive_weights", "args": [path]})
        if any(result["tensors"] != self._num_tensors for result in answer["results"]):
            raise SamplingError(f"a worker read other tensors than were sent: {answer['results']}", where=path)


class SharedMemoryTransfer:
    """A file in memory; its path and the number of its tensors are all that is sent."""

    def __init__(self, ask: Ask, num_tensors: int) -> None:
        self._ask, self._num_tensors = ask, num_tensors
        ask("/init_weight_transfer_engine", {"init_info": {}})

    def send(self, weights: Weights) -> None:
        """See :class:`Transfer`."""
        self._ask("/start_weight_update", {})
        update = {"path": str(weights.path.resolve()), "num_tensors": self._num_tensors}
        self._ask("/update_weights", {"update_info": update})
        self._ask("/finish_weight_update", {})


class GlooTransfer:
    """One tensor after the other over TCP, from the file: the trainer's weights may be on a GPU, and the file stays."""

    def __init__(self, ask: Ask, address: tuple[str, int]) -> None:
        self._ask = ask
        size = 1 + ask("/get_world_size", None)["world_size"]
        host = own_address(address)
        self._store = open_store(host, size)  # kept: it serves as long as the group lives
        meeting = in_background(lambda: join_group(self._store, 0, size, host=host))
        ask("/init_weight_transfer_engine", {"init_info": {"host": host, "port": self._store.port, "size": size}})
        self._group = meeting.result()

    def send(self, weights: Weights) -> None:
        """See :class:`Transfer`. A server that refuses leaves the sender waiting: the group ends with the server."""
        listed = [(name, str(tensor.dtype), list(tensor.shape)) for name, tensor in weights.tensors()]
        names, dtypes, shapes = zip(*listed, strict=True)
        update = {"names": names, "dtypes": [dtype.removeprefix("torch.") for dtype in dtypes], "shapes": shapes}
        self._ask("/start_weight_update", {})
        sending = in_background(lambda: self._broadcast(weights))
        self._ask("/update_weights", {"update_info": update})
        sending.result()
        self._ask("/finish_weight_update", {})

    def _broadcast(self, weights: Weights) -> None:
        for _, tensor in weights.tensors():
            broadcast(self._group, tensor)


def in_background(work: Callable[[], Any]) -> Future[Any]:
    """Run ``work`` in a thread that no one has to wait for, at the end of the process either."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 it is raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, name="weights", daemon=True).start()
    return future
