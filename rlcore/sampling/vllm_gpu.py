"""vLLM's own transports from GPU to GPU, the trainer's side: NCCL between GPUs, CUDA IPC on one.

They need vLLM in the trainer's environment too, which sends through classes of its own.
"""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rlcore.sampling.vllm_control import ControlGroup


class _Sent(Protocol):
    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]: ...
    def listed(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]: ...


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """What vLLM asks of a tensor before it is sent."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource:
    """The weights as vLLM's senders read them: first what will come, then the tensors themselves, on the GPU."""

    def __init__(self, device: torch.device) -> None:
        self.weights: _Sent | None = None
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
    """The four calls that vLLM's senders make, of one server or of several that are one group to the sender.

    ``sizes``: how many workers each server has. vLLM counts ranks within one server; those of the next begin where the
    ones before end.
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
        """What is sent; handles of GPU memory are made text by vLLM itself."""
        from vllm.distributed.weight_transfer.clients import _json_safe_update_payload

        self._group.ask("/update_weights", {"update_info": _json_safe_update_payload(update_info)})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """After the last; the version is named by who asked for the update."""
        self._group.ask("/finish_weight_update", {})


class BuiltInTransfer:
    """A sender of vLLM's; see :class:`rlcore.sampling.vllm_transfer.Transfer`."""

    def __init__(self, sender: Any, source: WeightSource) -> None:
        self._sender, self._source = sender, source

    def send(self, weights: _Sent) -> None:
        """See :class:`rlcore.sampling.vllm_transfer.Transfer`."""
        self._source.weights = weights
        self._sender.send_weights()
        self._source.weights = None


def is_installed() -> bool:
    """Whether this environment has vLLM."""
    return importlib.util.find_spec("vllm") is not None


def open_builtin(kind: str, group: ControlGroup, *, host: str, sizes: Sequence[int]) -> BuiltInTransfer:
    """Shake hands for ``nccl`` or ``ipc``; ``host`` is this machine's address on the way to the servers.

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
    """What vLLM's sender is told: for NCCL where to meet, and how many do (this process and every worker)."""
    if kind == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(rank=0, packed=True)
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    return NCCLTrainerInitInfo(rank=0, master_address=host, master_port=_free_port(host), world_size=1 + sum(sizes))


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
