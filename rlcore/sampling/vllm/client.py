"""HTTP requests to vLLM servers: one request, the routes of one server, and several servers at once."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from rlcore.errors import ConfigError, SamplingError

Result = TypeVar("Result")
_SECONDS = 600.0  # of a weight update


class Address(NamedTuple):
    """Where a server is. ``token``: what it asks for, if it is one of ours; no message and no log shows it."""

    host: str
    port: int
    token: str = ""

    def __repr__(self) -> str:
        return f"{self.host}:{self.port}"


class EngineUnreachableError(ConnectionError):
    """The server did not answer: it is gone, it hangs, or it broke off."""


def address_of(url: str) -> Address:
    """Host and port of ``http://host:port``.

    Raises:
        ConfigError: another scheme, or no port.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:  # a bracket without its partner, a port that is no number
        host, port = None, None
    if not url.startswith("http://") or not host or port is None:
        raise ConfigError(f"the engine's address {url!r} is not http://host:port", where="engine.urls")
    return Address(host, port)


def call(address: Address, path: str, payload: Mapping[str, Any] | None, *, seconds: float) -> tuple[int, Any]:
    """The HTTP status and the JSON of the answer, or its text; ``payload`` is posted as JSON, and None makes a GET.

    The connection is closed on the way out. The server then drops a request that still runs.

    Raises:
        EngineUnreachableError: the server was silent for ``seconds`` before its answer was complete.
    """
    connection = http.client.HTTPConnection(address.host, address.port, timeout=seconds)
    headers = {"Authorization": f"Bearer {address.token}"} if address.token else {}
    try:
        if payload is None:
            connection.request("GET", path, headers=headers)
        else:
            connection.request("POST", path, json.dumps(payload), headers | {"Content-Type": "application/json"})
        response = connection.getresponse()
        body = response.read()
        return response.status, _parsed(body)
    except (OSError, http.client.HTTPException) as error:
        raise EngineUnreachableError(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()


class EngineControl:
    """The routes of one server at ``address``; ``last_words`` gives what it logged last."""

    def __init__(self, address: Address, *, last_words: Callable[[], str]) -> None:
        self.address, self._last_words = address, last_words

    def ask(self, path: str, payload: Mapping[str, Any] | None, *, seconds: float = _SECONDS) -> Any:
        """The server's answer to ``payload``; None makes a GET.

        Raises:
            SamplingError: there was no answer within ``seconds``, or its status was not 200. The message has the last
                lines of the server's log.
        """
        try:
            status, answer = call(self.address, path, payload, seconds=seconds)
        except EngineUnreachableError as error:
            raise SamplingError(f"the engine does not answer {path}: {error}", fix=self._last_words()) from error
        if status != 200:
            raise SamplingError(f"the engine refused {path}: {str(answer)[:500]}", fix=self._last_words())
        return answer

    def name_version(self, policy_version: int) -> None:
        """Set the version that the server stamps on every token from now on."""
        self.ask("/update_weight_version", {"new_version": str(policy_version)})


class ControlGroup:
    """The routes of several servers, which are called at the same time."""

    def __init__(self, members: Sequence[EngineControl]) -> None:
        self.members = tuple(members)

    def ask(self, path: str, payload: Mapping[str, Any] | None) -> list[Any]:
        """The answer of each server.

        Raises:
            SamplingError: one of them refused. The others are not waited for, because they may be waiting for that one.
        """
        return self.tell(path, [payload] * len(self.members))

    def tell(self, path: str, payloads: Sequence[Mapping[str, Any] | None]) -> list[Any]:
        """As :meth:`ask`, but each server gets a payload of its own."""
        asked = [
            in_background(lambda member=member, payload=payload: member.ask(path, payload))  # type: ignore[misc]
            for member, payload in zip(self.members, payloads, strict=True)
        ]
        done, _ = wait(asked, return_when=FIRST_EXCEPTION)
        for each in done:
            each.result()  # one that failed is raised here
        return [each.result() for each in asked]


def in_background(work: Callable[[], Result]) -> Future[Result]:
    """The result of ``work``, which runs in a daemon thread, so that a silent peer cannot keep the process alive."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 it is raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, name="weights", daemon=True).start()
    return future


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode("utf-8", errors="replace")
