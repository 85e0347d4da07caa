"""HTTP server of an application: uvicorn, with bounded connections and heads, and OpenAI's form for its rejections."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import socket
import threading
from pathlib import Path
from types import FrameType

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from rlcore.errors import ServiceError
from rlcore.openai_api.guard import App
from rlcore.openai_api.requests import ApiError

logger = logging.getLogger(__name__)
MAX_CONNECTIONS_OF_KEY = 32
_SILENT_SECONDS = 30.0  # before, between and within the heads of requests, and in the rest of a refused body
_UNREAD_SECONDS = 60.0  # in which a client reads nothing of a reply
_GRACE_SECONDS = 5  # for unfinished replies when the server ends
_BACKLOG = 1024
_ACCEPTED = 64  # connections at once: each is a file of the process until the surplus is closed


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        ServiceError: The address does not belong to this machine, or the port is taken.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ServiceError(
            f"nothing can listen there: {error.strerror or error}",
            where=f"{host}:{port}",
            fix="name another --port, or an address of this machine as --host",
        ) from error


def max_connections() -> int:
    """Return the limit on connections: a quarter of the files that the process may open."""
    return max(64, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)


class Connections:
    """Open connections, bounded in all and per key.

    If there are too many, a new one replaces the oldest without a valid key, then the oldest idle one: honest clients
    reach the server whatever others open.
    """

    def __init__(self, most: int, most_of_key: int) -> None:
        self._most, self._most_of_key = most, most_of_key
        self._open: dict[Connection, str] = {}  # to its key, or ""; in order of age

    def add(self, connection: Connection) -> None:
        """Add a connection; close another, or itself, if there are too many."""
        self._open[connection] = ""
        if len(self._open) > self._most:
            others = [each for each in self._open if each is not connection]
            unknown = (each for each in others if not self._open[each])
            idle = (each for each in others if not each.is_busy)
            closed = next(unknown, None) or next(idle, connection)
            del self._open[closed]
            closed.transport.abort()

    def remove(self, connection: Connection) -> None:
        self._open.pop(connection, None)

    def admit(self, connection: Connection, key: str) -> bool:
        """Note the valid key of a connection; return False if the key has too many."""
        if connection in self._open and self._open[connection] != key:
            if sum(each == key for each in self._open.values()) >= self._most_of_key:
                return False
            self._open[connection] = key
        return True


class _Config(uvicorn.Config):
    connections: Connections


class Server(uvicorn.Server):
    """Server of ``app``; :meth:`uvicorn.Server.run` ends with SIGINT, SIGTERM or ``should_exit``."""

    def __init__(self, app: App, *, max_of_key: int | None = None, grace_seconds: int = _GRACE_SECONDS) -> None:
        config = _Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # the guard logs what fails
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_ACCEPTED,
            timeout_keep_alive=int(_SILENT_SECONDS),
            timeout_graceful_shutdown=grace_seconds,
        )
        most = max_connections()
        config.connections = Connections(most, max_of_key or most)
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections, few at a time; many may wait."""
        await super().startup(sockets)
        for each in sockets or []:
            each.listen(_BACKLOG)

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


class ServerThread:
    """Server of ``app`` on this machine in a daemon thread, at a free port and, if a path is given, a Unix socket."""

    def __init__(self, app: App) -> None:
        self._server = Server(app, max_of_key=MAX_CONNECTIONS_OF_KEY, grace_seconds=1)
        self._has_started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="http", daemon=True)
        self._sockets: list[socket.socket] = []

    def start(self, path: Path | None = None) -> int:
        """Accept connections from now on; return the port."""
        self._sockets = [listen("127.0.0.1", 0)]
        if path is not None:
            self._sockets.append(socket.socket(socket.AF_UNIX))
            self._sockets[-1].bind(str(path))
        self._thread.start()
        self._has_started.wait()
        port: int = self._sockets[0].getsockname()[1]
        return port

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """Close everything, after a moment for replies that are on their way."""
        self._server.should_exit = True
        self._thread.join()

    async def _serve(self) -> None:
        asyncio.get_running_loop().call_soon(self._has_started.set)
        try:
            await self._server.serve(sockets=self._sockets)
        finally:
            for each in list(self._server.server_state.connections):
                if each.transport is not None:
                    each.transport.abort()
            await asyncio.sleep(0)


class Connection(H11Protocol):
    """Connection that rejects other input than HTTP in the form of all rejections.

    It ends if its client is idle.
    """

    _timer: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    @property
    def is_busy(self) -> bool:
        return getattr(self, "cycle", None) is not None and not self.cycle.response_complete

    def admit(self, key: str) -> bool:
        """Note the valid key of a request; return False if the key has too many connections."""
        return self._all.admit(self, key)

    @property
    def _all(self) -> Connections:
        assert isinstance(self.config, _Config)
        return self.config.connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # pause_writing tells of every byte that the client does not read
        self.app_state = {**self.app_state, "connection": self}
        self._all.add(self)
        self._limit_silence()

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.remove(self)
        for timer in filter(None, (self._timer, self._unread)):
            timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(_UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._limit_silence()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._limit_silence()

    def _limit_silence(self) -> None:
        if self.is_busy:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        elif self._timer is None:
            self._timer = self.loop.call_later(_SILENT_SECONDS, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        """Answer 400 and close; only close if a reply has begun."""
        if self.conn.our_state is h11.IDLE or self.conn.our_state is h11.SEND_RESPONSE:
            reply = ApiError(400, msg, code="http_error").response
            headers = [*reply.raw_headers, (b"connection", b"close")]
            events = (
                h11.Response(status_code=400, headers=headers),
                h11.Data(data=bytes(reply.body)),
                h11.EndOfMessage(),
            )
            for event in events:
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
