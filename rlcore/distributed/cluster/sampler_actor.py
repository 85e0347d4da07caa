"""A sampler as a process of a cluster has it: the built-in engine, which knows which version it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rlcore.distributed.serialization import encode_error
from rlcore.hardware.machine import PRECISIONS
from rlcore.hardware.runtime import Runtime
from rlcore.sampling.native import NativeSampler
from rlcore.text.tokenization import ChatTokenizer

_METHODS = ("sample", "logprobs", "differing_parts")


class Sampler:
    """An engine that serves one version of the weights, and computes nothing for who asks of another one."""

    exported = b""

    def __init__(self, engine: NativeSampler) -> None:
        self._engine = engine

    def facts(self) -> dict[str, Any]:
        return {"policy_version": self._engine.policy_version}

    def answer(self, method: str, arguments: Sequence[Any], settings: Mapping[str, Any]) -> dict[str, Any]:
        """What the engine gives, and the version that it serves: where that is not the one asked for, nothing.

        An engine that was started in place of a dead one serves the first weights again.
        """
        given = dict(settings)
        wanted, result = given.pop("policy_version"), None
        try:
            if method == "load":
                self._engine.load_weights(given["weights"], policy_version=wanted)
            elif method == "differing_parts" and self._engine.policy_version == wanted:
                result = self._engine.differing_parts(given["weights"])
            elif method in _METHODS and self._engine.policy_version == wanted:
                result = getattr(self._engine, method)(*arguments, **given)
            elif method not in (*_METHODS, "describe"):
                raise ValueError(f"a sampler does no {method}")
        except Exception as error:  # noqa: BLE001 - told to who asked
            return encode_error(error)
        return {"result": result, **self.facts()}


@contextmanager
def open_sampler(setup: Mapping[str, Any]) -> Iterator[Sampler]:
    """The sampler that a setup describes."""
    torch.set_num_threads(setup["threads"])
    runtime = Runtime(device=torch.device(setup["device"]), compute_dtype=PRECISIONS[setup["dtype"]])
    model: Path = setup["model"]
    tokenizer = ChatTokenizer.load(model)
    yield Sampler(NativeSampler(runtime.load_frozen(model), tokenizer, max_concurrent=setup["max_concurrent"]))
