"""A worker that loses weights on the way, as told over the control plane. Runs in the engine's environment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from rlcore_worker import receiver  # type: ignore[import-not-found]  # lies beside it in the server's folder

_CHOSEN, _REPACK_HEAD = receiver.chosen, receiver.repack_head


class FaultyReceiver(receiver.WeightReceiver):  # type: ignore[misc]  # as above
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
        receiver.chosen, receiver.repack_head = (chosen, repack_head) if what else (_CHOSEN, _REPACK_HEAD)

    def receive_weights(self, path: str) -> dict[str, int]:
        if self.lost == "stale":
            return {"tensors": len(receiver.open_tensors(path))}
        answer: dict[str, int] = super().receive_weights(path)
        return answer
