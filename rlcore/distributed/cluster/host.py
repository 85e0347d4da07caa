"""Host process of a cluster: one rank, one sampler or one scorer, which answers requests as bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

import torch
from safetensors.torch import load

from rlcore.distributed.rank import open_rank
from rlcore.distributed.serialization import decode, encode, encode_error
from rlcore.hardware.machine import PRECISIONS
from rlcore.models.reward_ensemble import load_reward_model
from rlcore.models.runtime import Runtime
from rlcore.rewards.mix import WeightedReward, scores_of
from rlcore.rewards.reward_model import token_scorer
from rlcore.rewards.table import RewardResources, build_rewards
from rlcore.sampling.native import NativeSampler
from rlcore.text.tokenization import ChatTokenizer

Role = Literal["rank", "sampler", "scorer"]


class ActorRole(Protocol):
    """Protocol of a hosted object. ``exported``: bytes to be taken."""

    exported: bytes

    def facts(self) -> dict[str, Any]:
        """Return its properties after it was opened."""
        ...

    def answer(self, method: str, arguments: Sequence[Any], settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return a table with ``result``, or an error."""
        ...


class Host:
    """A process of the cluster. If opening fails, later requests get the error.

    With a setup it opens on creation, also if Ray recreates it after it died.
    """

    def __init__(self, role: Role, setup: bytes = b"") -> None:
        self._role, self._stack = role, ExitStack()
        self._served: ActorRole | None = None
        self._error: dict[str, Any] = {"crash": "it has no setup"}
        if setup:
            self.begin(setup)

    def begin(self, setup: bytes) -> bytes:
        """Open the object of the setup, and return its facts or the error."""
        try:
            self._served = self._stack.enter_context(OPEN[self._role](decode(setup)))
            return encode(self._served.facts())
        except Exception as error:  # noqa: BLE001 - sent to the caller
            self._error = encode_error(error)
            return encode(self._error)

    def ask(self, request: bytes, weights: bytes | None = None) -> bytes:
        """Answer a request (method, arguments, settings); ``weights``: a safetensors file that belongs to it."""
        if self._served is None:
            return encode(self._error)
        method, arguments, settings = decode(request)
        if weights is not None:
            settings = {**settings, "weights": load(weights)}
        return encode(self._served.answer(method, arguments, settings))

    def take(self) -> bytes:
        """Return the exported bytes and drop them."""
        assert self._served is not None
        found, self._served.exported = self._served.exported, b""
        return found


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


class Scorer:
    """Reward of a run."""

    exported = b""

    def __init__(self, reward: WeightedReward) -> None:
        self._reward = reward

    def facts(self) -> dict[str, Any]:
        return {}

    def answer(self, method: str, arguments: Sequence[Any], settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the scores of rollouts by a term, given by its number."""
        try:
            if method != "score":
                raise ValueError(f"a scorer has no method {method}")
            number, rollouts = arguments
            return {"result": scores_of(self._reward.terms[number].reward, rollouts)}
        except Exception as error:  # noqa: BLE001 - sent to the caller
            return encode_error(error)


@contextmanager
def open_scorer(setup: Mapping[str, Any]) -> Iterator[Scorer]:
    """Open the scorer of a setup."""
    torch.set_num_threads(setup["threads"])
    runtime = Runtime(device=torch.device(setup["device"]), compute_dtype=PRECISIONS[setup["dtype"]])
    scorers = {
        name: token_scorer(load_reward_model(runtime.load_frozen(folder), folder), setup["tokens_per_microbatch"])
        for name, folder in setup["models"].items()
    }
    resources = RewardResources(score_tokens=scorers, prefill=setup["prefill"])
    with build_rewards(setup["terms"], resources=resources) as reward:
        yield Scorer(reward)


OPEN: Mapping[Role, Callable[[Mapping[str, Any]], AbstractContextManager[ActorRole]]] = MappingProxyType(
    {"rank": open_rank, "sampler": open_sampler, "scorer": open_scorer}
)
