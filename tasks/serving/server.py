"""HTTP server of the application until a signal ends it: uvicorn, with OpenAI's form for its rejections."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from types import FrameType

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from rlcore.errors import ServiceError
from rlcore.tasks.serving.errors import error_body
from rlcore.tasks.serving.guard import App

_HEADER_SECONDS = 30.0  # within which a new connection must send a request's headers
_GRACE_SECONDS = 5  # for unfinished replies when the server ends


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        ServiceError: the address does not belong to this machine, or the port is taken.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ServiceError(
            f"nothing can listen there: {error.strerror or error}",
            where=f"{host}:{port}",
            fix="name another --port, or an address of this machine as --host",
        ) from error


class Server(uvicorn.Server):
    """Server of ``app``; :meth:`uvicorn.Server.run` ends with SIGINT, SIGTERM or ``should_exit``."""

    def __init__(self, app: App) -> None:
        config = uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=_GRACE_SECONDS,
        )
        super().__init__(config)

    def serve_until_signal(self, at: socket.socket) -> int:
        """Serve until a signal; return 0, or 128 plus the number of the signal, as shells do."""
        signals: list[int] = []

        def note(number: int, _: FrameType | None) -> None:
            signals.append(number)

        # uvicorn raises the signal again after its end; these handlers let the caller clean up.
        previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self.run(sockets=[at])
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        return 128 + signals[0] if signals else 0


class _Protocol(H11Protocol):
    """Connection that rejects non-HTTP input in the form of all rejections, and closes if silent."""

    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._patience = self.loop.call_later(_HEADER_SECONDS, self._close_if_silent)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._patience is not None:
            self._patience.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer 400 and close; only close if a reply has begun."""
        if self.conn.our_state is h11.IDLE or self.conn.our_state is h11.SEND_RESPONSE:
            body = json.dumps(error_body(400, msg)).encode()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _close_if_silent(self) -> None:
        if getattr(self, "cycle", None) is None:  # time limit of the connection's first request
            self.transport.close()
