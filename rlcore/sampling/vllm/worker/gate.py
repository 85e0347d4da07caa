"""Lets the trainer alone speak to its server: who does not send its token is answered 401, whatever the route.

The routes that take weights can do more than take weights, and any page in a browser on this machine can send requests
to a port of it. vLLM's own key guards the routes below ``/v1`` alone.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

TOKEN = "RLCORE_ENGINE_TOKEN"  # in the server's environment; never in a command line, which everybody can read
Scope = MutableMapping[str, Any]
App = Callable[[Scope, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]


class Gate:
    """ASGI middleware; the server adds it by its name, ``--middleware``."""

    def __init__(self, app: App) -> None:
        self._app, self._expected = app, f"Bearer {os.environ[TOKEN]}".encode()

    async def __call__(
        self, scope: Scope, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        if scope["type"] == "lifespan" or hmac.compare_digest(_sent(scope), self._expected):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"unauthorized"})


def _sent(scope: Scope) -> bytes:
    return next((value for name, value in scope["headers"] if name == b"authorization"), b"")
