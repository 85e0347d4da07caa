"""A rank of a distributed learner, which answers the same requests as the other ranks, in any kind of process.

As a child process, ``python -m rlcore.distributed.rank DESCRIPTOR PARENT``, it receives its setup and then requests
over a pipe. It ends with its parent.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from rlcore.distributed.build import make_rank_learner
from rlcore.distributed.build_supervised import SupervisedPlan, make_rank_supervised
from rlcore.distributed.serialization import decode, encode, encode_error
from rlcore.hardware.sharded import ShardConfig, gather_full, open_ranks
from rlcore.models.saving import save_tensors
from rlcore.training.local_learner import LocalLearner

MODULE = "rlcore.distributed.rank"
WEIGHTS = "weights.safetensors"
"""File name of exported weights."""

_METHODS = ("passes", "scores", "update", "run_slow_path", "step_errors", "observe_kl", "save", "wait", "save_model")


class Served:
    """An object of this process that answers calls of its ``methods``: a rank's learner, a sampler or a scorer.

    Attributes:
        facts: Fixed properties of the object, and its state when it was opened.
        exported: Bytes that a method returned, kept here until they are taken.
    """

    def __init__(
        self,
        methods: Mapping[str, Callable[..., Any]],
        *,
        facts: Mapping[str, Any] | None = None,
        state: Callable[[], Mapping[str, Any]] = dict,
        returns: bool = True,
    ) -> None:
        """Serve ``methods``; every answer has the ``state``. With ``returns=False`` results are not sent."""
        self.exported, self.facts = b"", {**(facts or {}), **state()}
        self._methods, self._state, self._returns = methods, state, returns

    def answer(self, method: str, arguments: Sequence[Any], settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return a table with ``result`` and the object's state, or one with ``error``, ``memory`` or ``crash``."""
        try:
            if method not in self._methods:
                raise ValueError(f"there is no method {method}")
            result = self._methods[method](*arguments, **settings)
        except Exception as error:  # noqa: BLE001 - sent to the caller
            return encode_error(error)
        if isinstance(result, bytes):
            self.exported, result = result, None
        return {"result": result if self._returns else None, **self._state()}


@contextmanager
def open_rank(setup: Mapping[str, Any]) -> Iterator[Served]:
    """Open the rank of ``setup`` after it has connected to the others. All ranks receive the same calls in order.

    Every rank has the result of a call; the first one returns it.
    """
    device, plan, config = setup["device"], setup["plan"], setup["distributed"]
    torch.set_num_threads(setup["threads"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.init()  # type: ignore[no-untyped-call]  # else a mesh chooses the device by rank number
    runtime, sharding = replace(setup["runtime"], device=device), None
    if config.is_sharded(adapted=plan.is_adapted):
        gathered = runtime.compute_dtype if config.gather_in_compute_dtype else None
        sharding = ShardConfig(dtype=gathered, offload=config.cpu_offload)
    address = {"store": setup["store"], "device": device, "width": config.tensor_parallel}
    seconds = 60.0 * config.timeout_minutes
    with open_ranks(setup["rank"], config.learner_ranks, timeout=seconds, **address) as ranks:
        torch.manual_seed(plan.seed)
        if isinstance(plan, SupervisedPlan):
            supervised = make_rank_supervised(plan, ranks, runtime, sharding=sharding)
            yield Served({name: getattr(supervised, name) for name in plan.methods}, returns=ranks.is_first)
        else:
            with closing(make_rank_learner(plan, ranks, runtime, sharding=sharding)) as learner:
                yield _served(learner, tokens=setup["tokens"], folder=setup["folder"])


def _served(learner: LocalLearner, *, tokens: int, folder: Path | None) -> Served:
    own = learner.learner

    def load(*arguments: Any, **settings: Any) -> dict[str, Any] | None:
        found = learner.load(*arguments, **settings)
        if tokens:
            own.tokens_per_microbatch = min(tokens, own.tokens_per_microbatch)
        return found

    def state() -> dict[str, Any]:
        numbers = {"policy_version": learner.policy_version, "kl_coefficient": learner.kl_coefficient}
        return {**numbers, "tokens": own.tokens_per_microbatch}

    methods = {name: getattr(learner, name) for name in _METHODS}
    methods |= {"load": load, "export": partial(_export, learner, folder)}
    facts = {"num_parameters": learner.facts.num_parameters, "compute_dtype": learner.facts.compute_dtype}
    return Served(methods, facts=facts, state=state, returns=own.ranks.is_first)


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


_POLL_SECONDS = 0.5


def main() -> None:
    """Serve requests until the pipe is closed."""
    end, parent = Connection(int(sys.argv[1])), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets Ctrl-C too, and ends the ranks in order
    setup = decode(end.recv_bytes())
    folder = Path(setup["folder"])
    threading.Thread(target=_end_with, args=(parent, folder), daemon=True).start()
    serve(end, setup)
    _end_with(parent, folder)  # a living parent ends this process itself


def serve(end: Connection, setup: Mapping[str, Any]) -> None:
    """Open the rank of ``setup``, and answer requests from ``end`` until it is closed.

    A request is (method, arguments, settings); :meth:`Served.answer` gives the answers.
    """
    try:
        with open_rank(setup) as rank:
            end.send_bytes(encode(rank.facts))
            while (request := _next(end)) is not None:
                end.send_bytes(encode(rank.answer(*request)))
    except Exception as error:  # noqa: BLE001 - sent to the caller
        end.send_bytes(encode(encode_error(error)))


def _next(end: Connection) -> Any:
    try:
        return decode(end.recv_bytes())
    except EOFError:
        return None


def _end_with(parent: int, folder: Path) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    main()
