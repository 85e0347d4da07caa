"""HTTP client of vLLM servers: one request, the routes of one server, and several servers concurrently."""

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
_SECONDS = 600.0  # timeout of a weight update


class Address(NamedTuple):
    """Address of a server. ``token`` authenticates to servers started by rlcore; messages and logs never contain it."""

    host: str
    port: int
    token: str = ""

    def __repr__(self) -> str:
        return f"{self.host}:{self.port}"


class EngineUnreachableError(ConnectionError):
    """No complete answer from the server: it ended, hangs, or closed the connection."""


def address_of(url: str) -> Address:
    """Parse host and port of ``http://host:port``.

    Raises:
        ConfigError: The URL has another scheme or no port.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:  # an unbalanced bracket or a malformed port
        host, port = None, None
    if not url.startswith("http://") or not host or port is None:
        raise ConfigError(f"the engine's address {url!r} is not http://host:port", where="engine.urls")
    return Address(host, port)


def call(address: Address, path: str, payload: Mapping[str, Any] | None, *, seconds: float) -> tuple[int, Any]:
    """Return the HTTP status and the answer as JSON or text. ``payload`` is posted as JSON; None sends a GET.

    On exit the connection is closed, and the server drops the request.

    Raises:
        EngineUnreachableError: The server sent nothing for ``seconds`` before its answer was complete.
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
    """Routes of the server at ``address``; ``log_tail`` reads its log."""

    def __init__(self, address: Address, *, log_tail: Callable[[], str]) -> None:
        self.address, self._log_tail = address, log_tail

    def ask(self, path: str, payload: Mapping[str, Any] | None, *, seconds: float = _SECONDS) -> Any:
        """Return the server's answer to ``payload``; None sends a GET.

        Raises:
            SamplingError: No answer within ``seconds``, or a status other than 200.
        """
        try:
            status, answer = call(self.address, path, payload, seconds=seconds)
        except EngineUnreachableError as error:
            raise SamplingError(f"the engine does not answer {path}: {error}", fix=self._log_tail()) from error
        if status != 200:
            raise SamplingError(f"the engine refused {path}: {str(answer)[:500]}", fix=self._log_tail())
        return answer

    def set_version(self, policy_version: int) -> None:
        """Set the version that the server assigns to every token from now on."""
        self.ask("/update_weight_version", {"new_version": str(policy_version)})


class ControlGroup:
    """Routes of several servers, called concurrently."""

    def __init__(self, members: Sequence[EngineControl]) -> None:
        self.members = tuple(members)

    def ask(self, path: str, payload: Mapping[str, Any] | None) -> list[Any]:
        """Return the answer of each server.

        Raises:
            SamplingError: A server refused; others, which may wait for it, are not awaited.
        """
        return self.ask_each(path, [payload] * len(self.members))

    def ask_each(self, path: str, payloads: Sequence[Mapping[str, Any] | None]) -> list[Any]:
        """Return the answer of each server to its own payload, as :meth:`ask`."""
        pending = [
            in_background(lambda member=member, payload=payload: member.ask(path, payload))  # type: ignore[misc]
            for member, payload in zip(self.members, payloads, strict=True)
        ]
        done, _ = wait(pending, return_when=FIRST_EXCEPTION)
        for each in done:
            each.result()  # raises its error
        return [each.result() for each in pending]


def in_background(work: Callable[[], Result]) -> Future[Result]:
    """Run ``work`` in a daemon thread, so that a silent peer cannot keep the process alive."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 it is raised where the result is pending for
            future.set_exception(error)

    threading.Thread(target=run, name="weights", daemon=True).start()
    return future


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode("utf-8", errors="replace")
