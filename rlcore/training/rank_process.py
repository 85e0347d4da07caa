"""One rank of a group: ``python -m rlcore.training.rank_process DESCRIPTOR PARENT``, started by the group alone.

It is told over a pipe what to be, then does what it is asked, one request after another, as its fellows do. It ends
with the process that started it, however that one ends.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rlcore.errors import RlcoreError
from rlcore.machine import PRECISIONS
from rlcore.models.runtime import Runtime
from rlcore.models.sharded import Sharding
from rlcore.ranks import Ranks, open_ranks, whole
from rlcore.training.building import LearnerPlan, make_share
from rlcore.training.local import LocalLearner
from rlcore.training.wire import decode, encode

_POLL_SECONDS = 0.5
_METHODS = ("passes", "scores", "update", "examine", "step_faults", "observe_kl", "save", "load", "wait", "save_model")


def main() -> None:
    """Be a rank until the pipe is closed."""
    end, parent = Connection(int(sys.argv[1])), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends the ranks in order
    setup = decode(end.recv_bytes())
    folder = Path(setup["folder"])
    threading.Thread(target=_end_with, args=(parent, folder), daemon=True).start()
    serve(end, setup)
    _end_with(parent, folder)  # a parent that is there ends this process itself


def serve(end: Connection, setup: Mapping[str, Any]) -> None:
    """Be what ``setup`` says, and answer requests from ``end`` until it is closed.

    A request is (method, arguments, settings); an answer is a table with ``result`` and where the learner stands, or
    with one of ``error``, ``memory`` and ``crash``.
    """
    device = torch.device(setup["device"])
    torch.set_num_threads(setup["threads"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.init()  # type: ignore[no-untyped-call]  # else a mesh chooses the device by the rank's number
    try:
        address = {"store": setup["store"], "device": device, "timeout": setup["seconds"]}
        with (
            open_ranks(setup["rank"], setup["size"], **address) as ranks,
            closing(_make(setup, ranks, device)) as learner,
        ):
            end.send_bytes(encode(_facts(learner)))
            while (request := _next(end)) is not None:
                end.send_bytes(encode(_answer(learner, request, setup["tokens"])))
    except Exception as error:  # noqa: BLE001 - told to who asked
        end.send_bytes(encode(_fault(error)))


def _make(setup: Mapping[str, Any], ranks: Ranks, device: torch.device) -> LocalLearner:
    dtype = PRECISIONS[setup["dtype"]]
    runtime = Runtime(device=device, compute_dtype=dtype, recompute=setup["recompute"])
    torch.manual_seed(setup["plan"]["seed"])
    sharding = Sharding(dtype=dtype if setup["narrow"] else None) if setup["sharded"] else None
    plan = LearnerPlan.from_json(setup["plan"])
    return make_share(plan, ranks, runtime, sharding=sharding, device=device)


def _next(end: Connection) -> Any:
    """The next request; None where there is none any more."""
    try:
        return decode(end.recv_bytes())
    except EOFError:
        return None


def _answer(learner: LocalLearner, request: Any, tokens: int) -> dict[str, Any]:
    method, arguments, settings = request
    result = None
    try:
        if method == "export":
            _export(learner, *arguments)
        elif method in _METHODS:
            result = getattr(learner, method)(*arguments, **settings)
        else:
            raise ValueError(f"a rank does no {method}")
        if method == "load" and tokens:
            learner.learner.tokens_per_microbatch = min(tokens, learner.learner.tokens_per_microbatch)
    except Exception as error:  # noqa: BLE001 - told to who asked
        return _fault(error)
    # Every rank knows the result, and one says it.
    return {"result": result if learner.learner.ranks.is_first else None, **_standing(learner)}


def _facts(learner: LocalLearner) -> dict[str, Any]:
    facts = learner.facts
    dtype = str(facts.compute_dtype).removeprefix("torch.")
    return {"num_parameters": facts.num_parameters, "dtype": dtype, **_standing(learner)}


def _standing(learner: LocalLearner) -> dict[str, Any]:
    return {
        "policy_version": learner.policy_version,
        "kl_coefficient": learner.kl_coefficient,
        "tokens": learner.learner.tokens_per_microbatch,
    }


def _fault(error: Exception) -> dict[str, Any]:
    if isinstance(error, torch.OutOfMemoryError):
        return {"memory": str(error).partition(". ")[0]}
    if isinstance(error, RlcoreError):
        return {"error": [type(error).__name__, error.what, error.where, error.fix]}
    traceback.print_exception(error)
    return {"crash": f"{type(error).__name__}: {error}"}


def _export(learner: LocalLearner, path: Path) -> None:
    """Write the policy's weights, one tensor at a time gathered from all ranks, by the first."""
    kept: dict[str, torch.Tensor] = {}
    for name, tensor in learner.weights().items():
        found = whole(tensor.detach())
        if learner.learner.ranks.is_first:
            kept[name] = found.cpu().contiguous().clone()  # tied weights share memory, which the format refuses
    if kept:
        save_file(kept, path)


def _end_with(parent: int, folder: Path) -> None:
    """End this process when its parent is gone, which cannot clean up any more."""
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    main()
