"""Access control of a server: requests without the trainer's token get status 401, on every route.

The weight routes can do more than load weights, and any page in a local browser can send requests. vLLM's own key
protects only the routes below ``/v1``.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

TOKEN = "RLCORE_ENGINE_TOKEN"  # in the server's environment, because every user can read a command line
Scope = MutableMapping[str, Any]
App = Callable[[Scope, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]


class Gate:
    """ASGI middleware, which the server loads by ``--middleware``."""

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
