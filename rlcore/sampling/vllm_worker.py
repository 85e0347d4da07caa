"""Runs inside every worker of a vLLM server (``--worker-extension-cls``): takes new weights from a file.

This module stands alone: the interpreter of the engine's environment imports it, where rlcore is not installed. The
name of the file is all that crosses the control plane; each worker reads the file and takes the part that it serves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch


class WeightReceiver:
    """Methods that vLLM mixes into its worker; the server's ``/collective_rpc`` calls them."""

    model_runner: Any  # these two are the worker's
    reload_weights: Callable[..., None]

    def receive_weights(self, path: str) -> dict[str, int]:
        """Serve the weights of ``path``, a safetensors file or a folder of such, from now on; no request may run.

        vLLM's layerwise reload restores the layout of a checkpoint, loads, and packs again for its kernels;
        ``load_weights`` alone ends half way on a CPU, where the weights are packed.

        Returns:
            ``tensors``: how many there were.
        """
        from safetensors.torch import load_file

        files = sorted(Path(path).glob("*.safetensors")) if Path(path).is_dir() else [Path(path)]
        # All is read before anything changes: a damaged file leaves the engine as it was.
        weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
        self.reload_weights(weights_iterator=self.chosen(weights))
        self.repack_head(self.model_runner.get_model())
        return {"tensors": len(weights)}

    def chosen(self, weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """What is loaded: everything."""
        return iter(weights.items())

    def repack_head(self, model: Any) -> None:
        """Pack an output head again that is tied to the embedding.

        On a CPU it multiplies by a packed copy, which no reload of the embedding renews: the log-probabilities are
        then those of mixed weights, and nothing raises.
        """
        head = getattr(model, "lm_head", None)
        if hasattr(head, "cpu_linear"):
            from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

            dispatch_cpu_unquantized_gemm(head, remove_weight=False)
