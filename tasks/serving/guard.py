"""Limits on requests: token, Host header, size of the body, time, number of concurrent requests.

Pure ASGI around the application, so that nothing is read or computed before a request is admitted.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse

from rlcore.tasks.serving.errors import ApiError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
LOOPBACK = ("127.0.0.1", "localhost", "::1")
OPEN = "/health"  # the one path without a token, for probes


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits: ``concurrent`` requests; ``seconds`` of one request, including its body and reply."""

    concurrent: int = 64
    seconds: float = 300.0
    body_bytes: int = 1 << 20
    body_seconds: float = 30.0


class Guard:
    """Guard that admits requests to ``app`` with the token and one of ``hosts``, and limits their time."""

    def __init__(self, app: App, *, token: str, hosts: Sequence[str], limits: Limits) -> None:
        self._app, self._token, self._limits = app, token.encode(), limits
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        begun = False

        async def note(message: MutableMapping[str, Any]) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            headers = self._admit(scope)
            async with asyncio.timeout(self._limits.seconds):
                await self._app(scope, _Body(receive, headers, self._limits).receive, note)
        except TimeoutError:
            if begun:  # closing the connection shows that the reply is incomplete
                return
            limit = f"the answer took longer than {self._limits.seconds:g} s"
            await _refuse(ApiError(504, limit, code="timeout"), scope, receive, send)
        except ApiError as error:
            if begun:
                raise
            await _refuse(error, scope, receive, send)

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
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        is_known = scheme.lower() == b"bearer" and secrets.compare_digest(given.strip(), self._token)
        if scope["path"] != OPEN and not is_known:
            raise ApiError(
                401, "the header `Authorization: Bearer <token>` is missing or wrong", code="invalid_api_key"
            )
        return headers


class _Body:
    """Request body with limited size and time."""

    def __init__(self, receive: Receive, headers: Mapping[bytes, bytes], limits: Limits) -> None:
        self._receive, self._headers, self._limits = receive, headers, limits
        self._size, self._is_whole = 0, False
        self._deadline = asyncio.get_running_loop().time() + limits.body_seconds

    async def receive(self) -> MutableMapping[str, Any]:
        """Return the next message; until the body is complete, within its time and size."""
        if self._is_whole:
            return await self._receive()
        if _length(self._headers.get(b"content-length", b"0")) > self._limits.body_bytes:
            raise self._too_large()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            what = f"the body did not come within {self._limits.body_seconds:g} s"
            raise ApiError(408, what, code="timeout") from None
        self._size += len(message.get("body", b""))
        if self._size > self._limits.body_bytes:
            raise self._too_large()
        self._is_whole = not message.get("more_body", False)
        return message

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body has more than {self._limits.body_bytes} bytes", code="body_too_large")


def _length(value: bytes) -> int:
    if not (value.isdigit() and len(value) < 20):
        raise ApiError(400, "the header content-length is invalid")
    return int(value)


def _host(value: bytes) -> str:
    """Return the name in a Host header, without port and without the brackets of an IPv6 address."""
    text = value.decode("latin-1").strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0]


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}.get(error.status, {})
    await JSONResponse(error.body(), error.status, headers)(scope, receive, send)
