"""A worker that loses weights on the way, as told over the control plane. Runs in the engine's environment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import vllm_worker  # type: ignore[import-not-found]  # lies beside it in the server's folder

_CHOSEN, _REPACK_HEAD = vllm_worker.chosen, vllm_worker.repack_head


class FaultyReceiver(vllm_worker.WeightReceiver):  # type: ignore[misc]  # as above
    """Loses tensors by the beginning of their names, all (``stale``), or the news for the tied head's copy (``head``).

    ``refuse`` breaks off in the middle.
    """

    lost = ""

    def lose(self, what: str) -> None:
        def chosen(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
            for number, (name, tensor) in enumerate(weights):
                if what == "refuse" and number == 5:
                    raise RuntimeError("this worker refuses")
                if what != "stale" and not name.startswith(what):
                    yield name, tensor

        def repack_head(model: Any) -> None:
            if what != "head":
                _REPACK_HEAD(model)

        self.lost = what
        vllm_worker.chosen, vllm_worker.repack_head = (chosen, repack_head) if what else (_CHOSEN, _REPACK_HEAD)

    def receive_weights(self, path: str) -> dict[str, int]:
        if self.lost == "stale":
            return {"tensors": len(vllm_worker.StoredWeights(path))}
        answer: dict[str, int] = super().receive_weights(path)
        return answer
