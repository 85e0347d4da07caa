"""Rollout worker in a process of a cluster: the built-in engine with a version check."""

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
    """Engine that serves one version of the weights, and computes nothing for requests of another version."""

    exported = b""

    def __init__(self, engine: NativeSampler) -> None:
        self._engine = engine

    def facts(self) -> dict[str, Any]:
        return {"policy_version": self._engine.policy_version}

    def answer(self, method: str, arguments: Sequence[Any], settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the engine's result and version; the result is None if the request is for another version.

        An engine that replaced a dead one serves the first weights again.
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
                raise ValueError(f"a sampler has no method {method}")
        except Exception as error:  # noqa: BLE001 - sent to the caller
            return encode_error(error)
        return {"result": result, **self.facts()}


@contextmanager
def open_sampler(setup: Mapping[str, Any]) -> Iterator[Sampler]:
    """Open the sampler of a setup."""
    torch.set_num_threads(setup["threads"])
    runtime = Runtime(device=torch.device(setup["device"]), compute_dtype=PRECISIONS[setup["dtype"]])
    model: Path = setup["model"]
    tokenizer = ChatTokenizer.load(model)
    yield Sampler(NativeSampler(runtime.load_frozen(model), tokenizer, max_concurrent=setup["max_concurrent"]))
