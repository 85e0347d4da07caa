"""Limits on requests: key, Host header, size of the body, time, connections of a key.

Pure ASGI around the application, so that nothing is read or computed before a request is admitted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect

from rlcore.openai_api.requests import ApiError

Result = TypeVar("Result")
logger = logging.getLogger(__name__)
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
_DRAINED = 8  # sizes of the largest body
_DRAIN_SECONDS = 1.0  # without a byte
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits: ``concurrent`` requests; ``seconds`` of one with body and reply, or None."""

    concurrent: int = 64
    seconds: float | None = 300.0
    body_bytes: int = 1 << 20
    body_seconds: float = 30.0


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Conditions of a request.

    Attributes:
        hosts: Names in the Host header.
        open_paths: Paths without a key, for probes.
        refused: Called with each rejection and its key.
    """

    allows: Callable[[str], bool]
    hosts: Collection[str] = LOOPBACK
    open_paths: Collection[str] = ()
    refused: Callable[[ApiError, str], None] = lambda error, key: None


class Guard:
    """Guard that admits requests to ``app``, limits their time, and answers an :class:`ApiError` of ``app``."""

    def __init__(self, app: App, admission: Admission, limits: Limits) -> None:
        self._app, self._admission, self._limits = app, admission, limits
        self._hosts = frozenset(host.lower() for host in admission.hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, begun = _Body(receive, self._limits), False

        async def note(message: MutableMapping[str, Any]) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            body.expected = int(self._admit(scope).get(b"content-length", b"0"))  # digits, says the server
            async with asyncio.timeout(self._limits.seconds):
                await self._app(scope, body.receive, note)
        except ClientDisconnect:
            pass
        except TimeoutError:
            if not begun:  # else closing the connection shows that the reply is incomplete
                limit = f"the answer took longer than {self._limits.seconds:g} s"
                await self._refuse(ApiError(504, limit, code="timeout"), scope, body, send)
        except ApiError as error:
            if begun:
                raise
            await self._refuse(error, scope, body, send)
        except Exception as error:
            if begun:
                raise
            logger.exception("a request failed")
            failed = ApiError(500, f"the server failed: {type(error).__name__}", code="internal_error")
            await self._refuse(failed, scope, body, send)

    def _admit(self, scope: Scope) -> Mapping[bytes, bytes]:
        """Return the headers of an admissible request, each once."""
        names = [name for name, _ in scope["headers"]]
        for name in (b"host", b"authorization", b"content-type", b"content-length", b"content-encoding"):
            if names.count(name) > 1:
                raise ApiError(400, f"the header {name.decode()} is there more than once")
        headers = dict(scope["headers"])
        if headers.keys() >= {b"content-length", b"transfer-encoding"}:
            raise ApiError(400, "the headers content-length and transfer-encoding exclude each other")
        if _host(headers.get(b"host", b"")) not in self._hosts:
            raise ApiError(403, "this server is not reached by that name (Host header)", code="host_not_allowed")
        if scope["path"] in self._admission.open_paths:
            return headers
        key = key_of(scope)
        if not key or not self._admission.allows(key):
            what = "the header `Authorization: Bearer <key>` is missing or wrong"
            raise ApiError(401, what, code="invalid_api_key")
        if not scope["state"]["connection"].admit(key):
            what = "the key has as many open connections as one key may have"
            raise ApiError(429, what, code="too_many_connections", may_retry=True)
        return headers

    async def _refuse(self, error: ApiError, scope: Scope, body: _Body, send: Send) -> None:
        self._admission.refused(error, key_of(scope))
        await body.drain()
        await error.response(scope, body.receive, send)


class _Body:
    """Request body with limited size and time; ``expected``: its announced length."""

    def __init__(self, receive: Receive, limits: Limits) -> None:
        self._receive, self._limits = receive, limits
        self._size, self._is_whole, self.expected = 0, False, 0
        self._deadline = asyncio.get_running_loop().time() + limits.body_seconds

    async def receive(self) -> MutableMapping[str, Any]:
        """Return the next message, until the body is complete within its limits."""
        if self._is_whole:
            return await self._receive()
        if self.expected > self._limits.body_bytes:
            raise self._too_large()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._next()
        except TimeoutError:
            what = f"the body did not come within {self._limits.body_seconds:g} s"
            raise ApiError(408, what, code="timeout") from None
        if self._size > self._limits.body_bytes:
            raise self._too_large()
        return message

    async def drain(self) -> None:
        """Read the rest of a refused body: many clients read no reply before they have sent all."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._deadline):
                while not self._is_whole and self._size < _DRAINED * self._limits.body_bytes:
                    async with asyncio.timeout(_DRAIN_SECONDS):
                        await self._next()

    async def _next(self) -> MutableMapping[str, Any]:
        message = await self._receive()
        self._size += len(message.get("body", b""))
        self._is_whole = not message.get("more_body", False)
        return message

    def _too_large(self) -> ApiError:
        what = f"the body is larger than {self._limits.body_bytes} bytes"
        return ApiError(413, what, code="body_too_large")


async def unless_gone(receive: Receive, work: Awaitable[Result]) -> Result:
    """Return the result of ``work``, unless the client disconnects: then it ends.

    Raises:
        ClientDisconnect: The client is gone.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(receive())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            raise ClientDisconnect
        return await working
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


def key_of(scope: Scope) -> str:
    """Return the key in the Authorization header of a request, or ""."""
    given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    scheme, _, key = given.decode("latin-1").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _host(value: bytes) -> str:
    text = value.decode("latin-1").strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0]
