"""A worker that loses weights on the way, as told over the control plane. Runs in the engine's environment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from safetensors.torch import load_file
from vllm_worker import WeightReceiver  # type: ignore[import-not-found]  # lies beside it in the server's folder


class FaultyReceiver(WeightReceiver):
    """Loses the tensor of a name, everything (``stale``), or the news for the tied head's packed copy (``head``)."""

    lost = ""

    def lose(self, what: str) -> None:
        self.lost = what

    def receive_weights(self, path: str) -> dict[str, int]:
        if self.lost == "stale":
            return {"tensors": len(load_file(path))}
        return super().receive_weights(path)

    def chosen(self, weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        return iter((name, tensor) for name, tensor in weights.items() if name != self.lost)

    def repack_head(self, model: Any) -> None:
        if self.lost != "head":
            super().repack_head(model)
