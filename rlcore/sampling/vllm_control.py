"""The control plane of one vLLM server: routes that answer or raise, and a weight update around a pause."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlcore.config import TransferKind
from rlcore.errors import SamplingError
from rlcore.sampling.vllm_http import EngineUnreachableError, call
from rlcore.sampling.vllm_transfer import Transfer, open_transfer
from rlcore.sampling.vllm_weights import Weights

ADAPTER = "policy"  # the name under which the server knows the adapter
_SECONDS = 600.0  # of a weight update


class EngineControl:
    """One server from its start to its end, at ``address``; ``last_words`` says what it logged last.

    The weight transfer is opened when it is first needed: a server that serves what it was started with needs none.
    """

    def __init__(
        self, address: tuple[str, int], *, transfer: TransferKind, num_tensors: int, last_words: Callable[[], str]
    ) -> None:
        self.address, self._last_words = address, last_words
        self._kind, self._num_tensors = transfer, num_tensors
        self._transfer: Transfer | None = None

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

    def publish(self, weights: Weights, policy_version: int) -> None:
        """Running requests wait (mode ``keep``) and go on with the new weights, their keys and values computed anew.

        Raises:
            SamplingError: the server refused; it may be paused, and hold a part of the weights.
        """
        send = self._send_adapter if weights.is_adapter else self._opened().send
        self.ask("/pause?mode=keep", {})
        send(weights)
        if not self.ask("/reset_prefix_cache?reset_running_requests=true", {})["success"]:
            raise SamplingError("the engine keeps the prefix cache of the old weights", fix=self._last_words())
        self.name_version(policy_version)
        self.ask("/resume", {})

    def _opened(self) -> Transfer:
        if self._transfer is None:
            self._transfer = open_transfer(self._kind, self.ask, self.address, num_tensors=self._num_tensors)
        return self._transfer

    def _send_adapter(self, weights: Weights) -> None:
        """In the place of the one before: requests that are under way go on with it."""
        adapter = {"lora_name": ADAPTER, "lora_path": str(weights.path.resolve()), "load_inplace": True}
        self.ask("/v1/load_lora_adapter", adapter)

    def name_version(self, policy_version: int) -> None:
        """The server stamps this on every token that it samples from now on."""
        self.ask("/update_weight_version", {"new_version": str(policy_version)})
