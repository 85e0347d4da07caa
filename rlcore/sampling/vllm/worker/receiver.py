"""Worker extension of vLLM (``--worker-extension-cls``) that loads new weights from a file of the trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from .checksums import engine_checksums


def stored_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a safetensors file, or of a folder of such files. Tied tensors occur once."""
    from safetensors import safe_open

    for each in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        with safe_open(each, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 no mapping
                yield name, file.get_tensor(name)


def repack_head(model: Any) -> None:
    """Repack an output head that is tied to the embedding.

    On a CPU the head uses a packed copy, which a reload of the embedding does not update. The log-probabilities would
    come from mixed weights without any error.
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
        """Serve the weights of ``path``, and return the number of tensors as ``tensors``.

        No request may run. vLLM's layerwise reload restores the layout of a checkpoint, loads it, and repacks it for
        its kernels. ``load_weights`` alone fails on a CPU, where the weights are packed.
        """
        names: list[str] = []

        def read() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in stored_tensors(Path(path)):
                names.append(name)
                yield name, tensor

        self.reload_weights(weights_iterator=read())
        repack_head(self.model_runner.get_model())
        return {"tensors": len(names)}

    def weight_checksums(self, seed: int) -> dict[str, Any]:
        """Return the checksums of the model's weights; see :func:`.checksums.engine_checksums`."""
        model = self.model_runner.get_model()
        return engine_checksums(model, dtype=self.model_runner.model_config.dtype, seed=seed)
