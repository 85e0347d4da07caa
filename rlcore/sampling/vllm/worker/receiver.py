"""Worker extension of vLLM (``--worker-extension-cls``) that receives new weights from the trainer.

Importing it adds a transport without a GPU, ``gloo``, to vLLM's weight-transfer API.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from .checksums import engine_checksums
from .gloo import broadcast, join_group, join_store, own_address


def open_tensors(path: str) -> dict[str, Any]:
    """Return the open file of every tensor of a safetensors file, or of a folder of such files.

    Raises:
        OSError, SafetensorError: A file is missing or incomplete.
    """
    from safetensors import safe_open

    files = sorted(Path(path).glob("*.safetensors")) if Path(path).is_dir() else [Path(path)]
    opened: list[Any] = [safe_open(file, framework="pt") for file in files]
    return {name: file for file in opened for name in file.keys()}  # noqa: SIM118 no mapping


def chosen(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the tensors to load: all of them."""
    return iter(weights)


def repack_head(model: Any) -> None:
    """Repack an output head that is tied to the embedding.

    On a CPU the head uses a packed copy, which a reload of the embedding does not update. Log-probabilities would
    silently come from mixed weights.
    """
    head = getattr(model, "lm_head", None)
    if hasattr(head, "cpu_linear"):
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        dispatch_cpu_unquantized_gemm(head, remove_weight=False)


class WeightReceiver:
    """Methods that vLLM adds to its worker. The server's ``/collective_rpc`` calls them."""

    model_runner: Any  # both attributes belong to the worker
    reload_weights: Callable[..., None]

    def receive_weights(self, path: str) -> dict[str, int]:
        """Serve the weights of ``path``, a safetensors file or a folder of such files.

        No request may run. vLLM's layerwise reload repacks for its kernels; ``load_weights`` alone fails on a CPU,
        where weights are packed.

        Returns:
            ``tensors``: the number of tensors.
        """
        files = open_tensors(path)
        self.reload_weights(weights_iterator=chosen((name, file.get_tensor(name)) for name, file in files.items()))
        repack_head(self.model_runner.get_model())
        return {"tensors": len(files)}

    def weight_checksums(self, seed: int) -> dict[str, Any]:
        """Return the checksums of the model's weights; see :func:`.checksums.engine_checksums`."""
        model = self.model_runner.get_model()
        return engine_checksums(model, dtype=self.model_runner.model_config.dtype, seed=seed)


@dataclass
class GlooInit(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not typed here
    """Address of the trainer's store, and the number of members: the trainer and every worker of every server.

    ``first_rank`` is the rank of this server's first worker.
    """

    host: str
    port: int
    size: int
    first_rank: int


@dataclass
class GlooUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]  # as above
    """Metadata of the following tensors, in their order."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


class GlooTransfer(WeightTransferEngine):  # type: ignore[misc]  # as above
    """Receiver of one tensor after the other over TCP, loaded by vLLM's layerwise reload."""

    init_info_cls = GlooInit
    update_info_cls = GlooUpdate
    group: Any = None

    def init_transfer_engine(self, init_info: GlooInit) -> None:
        parallel = self.parallel_config
        rank = init_info.first_rank + parallel.data_parallel_index * parallel.world_size + parallel.rank
        store = join_store(init_info.host, init_info.port, init_info.size)
        host = own_address((init_info.host, init_info.port))
        self.group = join_group(store, rank, init_info.size, host=host)

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base method waits for an accelerator, which may not exist.
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        repack_head(self.model)

    def receive_weights(self, update_info: GlooUpdate) -> None:
        self.model.load_weights(chosen(self._arriving(update_info)))

    def _arriving(self, update: GlooUpdate) -> Iterator[tuple[str, torch.Tensor]]:
        for name, dtype, shape in zip(update.names, update.dtypes, update.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            broadcast(self.group, tensor)
            yield name, tensor

    def shutdown(self) -> None:
        self.group = None


WeightTransferEngineFactory.register_engine("gloo", GlooTransfer)
