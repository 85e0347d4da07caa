"""The control plane of vLLM servers: routes that answer or raise, asked of one server or of several at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from typing import Any

from rlcore.errors import SamplingError
from rlcore.sampling.background import in_background
from rlcore.sampling.vllm_http import EngineUnreachableError, call
from rlcore.sampling.vllm_weights import Weights

ADAPTER = "policy"  # the name under which the server knows the adapter
_SECONDS = 600.0  # of a weight update


class EngineControl:
    """One server from its start to its end, at ``address``; ``last_words`` says what it logged last."""

    def __init__(self, address: tuple[str, int], *, last_words: Callable[[], str]) -> None:
        self.address, self._last_words = address, last_words

    def ask(self, path: str, payload: Mapping[str, Any] | None, *, seconds: float = _SECONDS) -> Any:
        """What the server answers; ``payload`` None is a GET.

        Raises:
            SamplingError: no answer within ``seconds``, or a status other than 200; with the last lines of its log.
        """
        try:
            status, answer = call(self.address, path, payload, seconds=seconds)
        except EngineUnreachableError as error:
            raise SamplingError(f"the engine does not answer {path}: {error}", fix=self._last_words()) from error
        if status != 200:
            raise SamplingError(f"the engine refused {path}: {str(answer)[:500]}", fix=self._last_words())
        return answer

    def name_version(self, policy_version: int) -> None:
        """The server stamps this on every token that it samples from now on."""
        self.ask("/update_weight_version", {"new_version": str(policy_version)})


class ControlGroup:
    """Several servers that are told the same things at the same time."""

    def __init__(self, members: Sequence[EngineControl]) -> None:
        self.members = tuple(members)

    def ask(self, path: str, payload: Mapping[str, Any] | None) -> list[Any]:
        """What each server answers.

        Raises:
            SamplingError: one of them refused; the others are not waited for, because they may wait for that one.
        """
        return self.tell(path, [payload] * len(self.members))

    def tell(self, path: str, payloads: Sequence[Mapping[str, Any] | None]) -> list[Any]:
        """As :meth:`ask`, with a payload for each server."""
        asked = [
            in_background(lambda member=member, payload=payload: member.ask(path, payload))  # type: ignore[misc]
            for member, payload in zip(self.members, payloads, strict=True)
        ]
        done, _ = wait(asked, return_when=FIRST_EXCEPTION)
        for each in done:
            each.result()  # one that failed is raised here
        return [each.result() for each in asked]


def publish(group: ControlGroup, weights: Weights, policy_version: int, send: Callable[[Weights], None]) -> None:
    """Serve ``weights`` from now on; ``send`` brings them over, unless they are an adapter, which the servers read.

    Running requests wait (mode ``keep``) and go on with the new weights, their keys and values computed anew.

    Raises:
        SamplingError: a server refused; it may be paused, and hold a part of the weights.
    """
    group.ask("/pause?mode=keep", {})
    if weights.is_adapter:  # in the place of the one before: requests that are under way go on with it
        adapter = {"lora_name": ADAPTER, "lora_path": str(weights.path.resolve()), "load_inplace": True}
        group.ask("/v1/load_lora_adapter", adapter)
    else:
        send(weights)
    for answer in group.ask("/reset_prefix_cache?reset_running_requests=true", {}):
        if not answer["success"]:
            raise SamplingError("the engine keeps the prefix cache of the old weights")
    group.ask("/update_weight_version", {"new_version": str(policy_version)})
    group.ask("/resume", {})
