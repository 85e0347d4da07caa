"""A rank of a distributed learner, which answers the same requests as the other ranks, in any kind of process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from rlcore.distributed.build import make_rank_learner
from rlcore.distributed.build_supervised import make_rank_supervised
from rlcore.distributed.serialization import encode_error
from rlcore.hardware.machine import PRECISIONS
from rlcore.hardware.sharded import Ranks, ShardConfig, gather_full, open_ranks
from rlcore.models.runtime import Runtime
from rlcore.models.saving import save_tensors
from rlcore.training.dpo import DpoLearner
from rlcore.training.local_learner import LocalLearner
from rlcore.training.reward_learner import RewardLearner
from rlcore.training.sft import SftLearner

WEIGHTS = "weights.safetensors"
"""File name of exported weights."""

_METHODS = ("passes", "scores", "update", "run_slow_path", "step_errors", "observe_kl", "save", "wait", "save_model")
_SUPERVISED_METHODS = {
    SftLearner: ("step", "mean_loss", "shuffle_gap", "save_model"),
    DpoLearner: ("begin", "step", "rewards", "save_model"),
    RewardLearner: ("features", "states", "set_heads", "begin", "step", "scores", "probe", "save_model"),
}


class Rank:
    """The learner of this process. All ranks receive the same calls of ``methods`` in the same order.

    Attributes:
        exported: Bytes that a method returned, kept here until they are taken.
    """

    def __init__(
        self,
        ranks: Ranks,
        methods: Mapping[str, Callable[..., Any]],
        *,
        facts: Mapping[str, Any],
        state: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self.exported = b""
        self._ranks, self._methods, self._facts, self._state = ranks, methods, facts, state

    def facts(self) -> dict[str, Any]:
        """Return the fixed properties of the learner, and its current state."""
        return {**self._facts, **self._state()}

    def answer(self, method: str, arguments: Sequence[Any], settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return a table with ``result`` and the learner's state, or one with ``error``, ``memory`` or ``crash``."""
        try:
            if method not in self._methods:
                raise ValueError(f"a rank has no method {method}")
            result = self._methods[method](*arguments, **settings)
        except Exception as error:  # noqa: BLE001 - sent to the caller
            return encode_error(error)
        if isinstance(result, bytes):
            self.exported, result = result, None
        # Every rank has the result; the first one returns it.
        return {"result": result if self._ranks.is_first else None, **self._state()}


@contextmanager
def open_rank(setup: Mapping[str, Any]) -> Iterator[Rank]:
    """Open the rank of ``setup`` after it has connected to the others."""
    device = torch.device(setup["device"])
    torch.set_num_threads(setup["threads"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.init()  # type: ignore[no-untyped-call]  # else a mesh chooses the device by rank number
    address = {"store": setup["store"], "device": device, "timeout": setup["seconds"], "width": setup["width"]}
    with open_ranks(setup["rank"], setup["size"], **address) as ranks, ExitStack() as stack:
        torch.manual_seed(setup["plan"].seed)
        yield (_supervised_rank if setup["kind"] == "supervised" else partial(_rl_rank, stack))(setup, ranks, device)


def _rl_rank(stack: ExitStack, setup: Mapping[str, Any], ranks: Ranks, device: torch.device) -> Rank:
    plan, (runtime, sharding) = setup["plan"], _precision(setup, device)
    learner = stack.enter_context(closing(make_rank_learner(plan, ranks, runtime, sharding=sharding, device=device)))

    def load(*arguments: Any, **settings: Any) -> dict[str, Any] | None:
        found = learner.load(*arguments, **settings)
        if setup["tokens"]:
            learner.learner.tokens_per_microbatch = min(setup["tokens"], learner.learner.tokens_per_microbatch)
        return found

    def state() -> dict[str, Any]:
        return {
            "policy_version": learner.policy_version,
            "kl_coefficient": learner.kl_coefficient,
            "tokens": learner.learner.tokens_per_microbatch,
        }

    own = {"load": load, "export": partial(_export, learner, setup["folder"])}
    methods = {name: getattr(learner, name) for name in _METHODS} | own
    facts = {"num_parameters": learner.facts.num_parameters, "dtype": _name(learner.facts.compute_dtype)}
    return Rank(ranks, methods, facts=facts, state=state)


def _supervised_rank(setup: Mapping[str, Any], ranks: Ranks, device: torch.device) -> Rank:
    plan, (runtime, sharding) = setup["plan"], _precision(setup, device)
    learner = make_rank_supervised(plan, ranks, runtime, sharding=sharding, device=device)
    names = _SUPERVISED_METHODS[type(learner)]
    return Rank(ranks, {name: getattr(learner, name) for name in names}, facts={})


def _precision(setup: Mapping[str, Any], device: torch.device) -> tuple[Runtime, ShardConfig | None]:
    dtype = PRECISIONS[setup["dtype"]]
    gathered = dtype if setup["narrow"] else None
    sharding = ShardConfig(dtype=gathered, offload=setup["offload"]) if setup["sharded"] else None
    return Runtime(device=device, compute_dtype=dtype, gradient_checkpointing=setup["gradient_checkpointing"]), sharding


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _export(learner: LocalLearner, folder: Path | None) -> bytes:
    """Gather the policy's weights on the first rank, one tensor at a time.

    Write them to a file in ``folder`` if there is one, else return their bytes.
    """
    kept: dict[str, torch.Tensor] = {}
    for name, tensor in learner.weights().items():
        found = gather_full(tensor.detach())
        if learner.learner.ranks.is_first:
            kept[name] = found.cpu().contiguous().clone()  # safetensors rejects shared memory of tied weights
    if not kept or not folder:
        return save(kept) if kept else b""
    path = folder / WEIGHTS
    path.unlink(missing_ok=True)  # processes that mapped the old file keep it
    save_tensors(kept, path)
    return b""
