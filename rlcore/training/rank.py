"""One rank of a group: a share of a learner that answers requests as its fellows do, in whatever process it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save, save_file

from rlcore.machine import PRECISIONS
from rlcore.models.runtime import Runtime
from rlcore.models.sharded import Sharding
from rlcore.ranks import Ranks, open_ranks, whole
from rlcore.training.building import LearnerPlan, make_share
from rlcore.training.local import LocalLearner
from rlcore.training.wire import fault_of

WEIGHTS = "weights.safetensors"
"""What an export leaves in the folder of a group that has one."""

_METHODS = (
    *("passes", "scores", "update", "examine", "step_faults", "observe_kl"),
    *("save", "load", "wait", "save_model"),
)


class Rank:
    """This process's share of a learner.

    ``folder``: where the first rank leaves the weights that it exports; without one they are ``exported``, as the bytes
    of such a file. ``tokens`` > 0: so many at most in a micro-batch.
    """

    def __init__(self, learner: LocalLearner, *, tokens: int, folder: Path | None) -> None:
        self.exported = b""
        self._learner, self._tokens, self._folder = learner, tokens, folder

    def facts(self) -> dict[str, Any]:
        """What is fixed about the policy, and where the learner stands."""
        facts = self._learner.facts
        dtype = str(facts.compute_dtype).removeprefix("torch.")
        return {"num_parameters": facts.num_parameters, "dtype": dtype, **self._standing()}

    def answer(self, method: str, arguments: Sequence[Any], settings: Mapping[str, Any]) -> dict[str, Any]:
        """A table with ``result`` and where the learner stands, or with one of ``error``, ``memory`` and ``crash``.

        All ranks are asked at the same point.
        """
        learner, result = self._learner, None
        try:
            if method == "export":
                self._export()
            elif method in _METHODS:
                result = getattr(learner, method)(*arguments, **settings)
            else:
                raise ValueError(f"a rank does no {method}")
            if method == "load" and self._tokens:
                learner.learner.tokens_per_microbatch = min(self._tokens, learner.learner.tokens_per_microbatch)
        except Exception as error:  # noqa: BLE001 - told to who asked
            return fault_of(error)
        # Every rank knows the result, and one says it.
        return {"result": result if learner.learner.ranks.is_first else None, **self._standing()}

    def _standing(self) -> dict[str, Any]:
        return {
            "policy_version": self._learner.policy_version,
            "kl_coefficient": self._learner.kl_coefficient,
            "tokens": self._learner.learner.tokens_per_microbatch,
        }

    def _export(self) -> None:
        """Keep the policy's weights on the first rank, gathered from all of them one tensor at a time."""
        kept: dict[str, torch.Tensor] = {}
        for name, tensor in self._learner.weights().items():
            found = whole(tensor.detach())
            if self._learner.learner.ranks.is_first:
                kept[name] = found.cpu().contiguous().clone()  # tied weights share memory, which the format refuses
        if kept and self._folder:
            path = self._folder / WEIGHTS
            path.unlink(missing_ok=True)  # who has mapped the last ones keeps them
            save_file(kept, path)
        elif kept:
            self.exported = save(kept)


@contextmanager
def open_rank(setup: Mapping[str, Any]) -> Iterator[Rank]:
    """The rank that ``setup`` describes, when it has met the others."""
    device = torch.device(setup["device"])
    torch.set_num_threads(setup["threads"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.init()  # type: ignore[no-untyped-call]  # else a mesh chooses the device by the rank's number
    address = {"store": setup["store"], "device": device, "timeout": setup["seconds"]}
    with open_ranks(setup["rank"], setup["size"], **address) as ranks, closing(_make(setup, ranks, device)) as learner:
        yield Rank(learner, tokens=setup["tokens"], folder=setup["folder"])


def _make(setup: Mapping[str, Any], ranks: Ranks, device: torch.device) -> LocalLearner:
    dtype = PRECISIONS[setup["dtype"]]
    runtime = Runtime(device=device, compute_dtype=dtype, recompute=setup["recompute"])
    torch.manual_seed(setup["plan"]["seed"])
    sharding = Sharding(dtype=dtype if setup["narrow"] else None) if setup["sharded"] else None
    plan = LearnerPlan.from_json(setup["plan"])
    return make_share(plan, ranks, runtime, sharding=sharding, device=device)
