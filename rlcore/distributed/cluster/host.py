"""Host process of a cluster: one rank, one sampler or one scorer, which answers requests as bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import MappingProxyType
from typing import Any, Literal, Protocol

from safetensors.torch import load

from rlcore.distributed.cluster.sampler_actor import open_sampler
from rlcore.distributed.cluster.scorer_actor import open_scorer
from rlcore.distributed.rank import open_rank
from rlcore.distributed.serialization import decode, encode, encode_error

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


OPEN: Mapping[Role, Callable[[Mapping[str, Any]], AbstractContextManager[ActorRole]]] = MappingProxyType(
    {"rank": open_rank, "sampler": open_sampler, "scorer": open_scorer}
)


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
