"""How vLLM servers are asked over HTTP: one request, the routes of one server, and several servers at once."""

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
    """Where a server is; ``token``: what it asks for, where it is one of ours."""

    host: str
    port: int
    token: str = ""


class EngineUnreachableError(ConnectionError):
    """No answer: the server is gone, hangs, or broke off."""


def address_of(url: str) -> Address:
    """Host and port of ``http://host:port``.

    Raises:
        ConfigError: another scheme, or no port.
    """
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.port is None:
        raise ConfigError(f"the engine's address {url!r} is not http://host:port", where="engine.urls")
    return Address(parts.hostname, parts.port)


def call(address: Address, path: str, payload: Mapping[str, Any] | None, *, seconds: float) -> tuple[int, Any]:
    """POST ``payload`` as JSON (None: GET); returns the HTTP status and the JSON of the answer, or its text.

    The connection is closed on the way out, upon which the server drops a request that still runs.

    Raises:
        EngineUnreachableError: no whole answer within ``seconds`` of silence.
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
    """One server from its start to its end, at ``address``; ``last_words`` says what it logged last."""

    def __init__(self, address: Address, *, last_words: Callable[[], str]) -> None:
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


def in_background(work: Callable[[], Result]) -> Future[Result]:
    """The result of ``work``, which runs in a daemon thread: a peer that never answers does not hold the process."""
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
