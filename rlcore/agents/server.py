"""HTTP server of the gateway: requests within limits, replies in JSON or as server-sent events, one thread each."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rlcore.agents.wire.conversation import ApiError, Json
from rlcore.environments.base import json_value
from rlcore.errors import shown

BODY_SECONDS = 30.0  # without a byte of a request that has begun
STOP_SECONDS = 1.0  # for replies that are on their way
_DRAINED = 8  # sizes of the largest body that are read from a larger one, so that its sender reads the refusal
_MAX_LINE = 1024  # of the size of a chunk


class Exchange(BaseHTTPRequestHandler):
    """Request and the way to answer it."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # a reply is one write
    server: GatewayServer

    body = b""
    read_at = 0.0

    @property
    def parts(self) -> tuple[str, ...]:
        """Path without slashes and query."""
        return tuple(filter(None, self.path.partition("?")[0].split("/")))

    @property
    def key(self) -> str:
        """API key, or ""."""
        kind, _, key = self.headers.get("Authorization", "").partition(" ")
        return key.strip() if kind.lower() == "bearer" else ""

    @property
    def retry_count(self) -> int:
        """Number of earlier attempts, which OpenAI's clients send."""
        count = self.headers.get("x-stainless-retry-count", "")
        return int(count) if count.isdecimal() else 0

    def json(self) -> Json:
        """Return the body.

        Raises:
            ApiError: It is no JSON object.
        """
        try:
            found = json_value(self.body.decode())
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is no valid JSON: {shown(error)}", code="invalid_json") from error
        if not isinstance(found, dict):
            raise ApiError(400, "the body must be a JSON object", code="invalid_json")
        return found

    def is_connected(self) -> bool:
        """Return False if the client has closed its connection."""
        try:
            return bool(self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def reply_json(self, body: Json, *, status: int = 200, headers: Json | None = None) -> None:
        """Send a JSON object."""
        self._send(status, "application/json", json.dumps(body).encode(), headers or {})

    def reply_events(self, stream: bytes) -> None:
        """Send server-sent events."""
        self._send(200, "text/event-stream; charset=utf-8", stream, {"Cache-Control": "no-cache"})

    def reply_error(self, error: ApiError) -> None:
        """Send an error. OpenAI's clients repeat a request only if ``x-should-retry`` is true."""
        retry = {"x-should-retry": "true", "retry-after": "1"} if error.may_retry else {"x-should-retry": "false"}
        with suppress(OSError):
            self.reply_json(error.body, status=error.status, headers=retry)

    def _send(self, status: int, kind: str, content: bytes, headers: Json) -> None:
        self.send_response(status)
        lines = {"Content-Type": kind, "Content-Length": len(content), **headers}
        for name, value in (lines | ({"Connection": "close"} if self.close_connection else {})).items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(content)
        self.wfile.flush()

    def _handle(self) -> None:
        try:
            self.body = self._read_body()
            self.read_at = time.monotonic()
            self.server.answer(self)
        except ApiError as error:  # of the body, whose rest cannot be found
            self.close_connection = True
            self.server.refuse(self, error)
        except OSError:
            self.close_connection = True
        except Exception as error:  # noqa: BLE001 - ends the run: no agent that gets the reply may be blamed for it
            self.server.failure = error
            self.reply_error(ApiError(500, "internal error of the gateway; the run ends", code="internal_error"))

    do_GET = do_POST = _handle  # noqa: N815 — names that the base class calls

    def _read_body(self) -> bytes:
        """Return the body.

        Raises:
            ApiError: It is too large, incomplete, or its length is invalid.
        """
        self.connection.settimeout(BODY_SECONDS)
        try:
            if "chunked" in self.headers.get("Transfer-Encoding", "").lower():
                return self._read_chunks()
            length = self.headers.get("Content-Length", "0")
            if not length.isdecimal():
                raise ApiError(400, f"invalid Content-Length {shown(length, max_chars=60)}", code="invalid_length")
            if int(length) > self.server.max_body_bytes:
                self._drain(int(length))
                raise self._too_large()
            body = self.rfile.read(int(length))
        except TimeoutError as error:
            raise ApiError(408, f"no byte of the body for {BODY_SECONDS:g} s", code="timeout") from error
        finally:
            self.connection.settimeout(None)
        if len(body) < int(length):
            raise ConnectionError("the client left within its request")
        return body

    def _read_chunks(self) -> bytes:
        body = bytearray()
        while True:
            line = self.rfile.readline(_MAX_LINE).partition(b";")[0].strip()
            try:
                size = int(line, 16)
            except ValueError as error:
                raise ApiError(400, "invalid size of a chunk", code="invalid_length") from error
            if size < 0 or len(body) + size > self.server.max_body_bytes:
                self._drain(size)
                raise self._too_large()
            if size == 0:
                while self.rfile.readline(_MAX_LINE).strip():  # trailers
                    pass
                return bytes(body)
            body += self.rfile.read(size)
            self.rfile.readline(_MAX_LINE)

    def _drain(self, size: int) -> None:
        """Read the rest of a body that is too large, up to a limit."""
        self.connection.settimeout(1.0)
        left = min(size, _DRAINED * self.server.max_body_bytes)
        with suppress(OSError):
            while left > 0 and (piece := self.rfile.read1(min(left, 1 << 16))):
                left -= len(piece)

    def _too_large(self) -> ApiError:
        limit = self.server.max_body_bytes
        return ApiError(413, f"the body is larger than {limit} bytes: shorten the history", code="body_too_large")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send an error of HTTP itself, such as a malformed request line."""
        self.close_connection = True
        self.reply_error(ApiError(code, message or "malformed request", code="http_error"))

    def log_message(self, *_: Any) -> None:
        """Log nothing: records have the calls."""


class GatewayServer(ThreadingHTTPServer):
    """Server on a free port of this machine.

    ``answer`` answers each request in a thread of its own, and ``refuse`` those whose body cannot be read. ``failure``
    is an unexpected exception of either.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024

    def __init__(
        self,
        answer: Callable[[Exchange], None],
        refuse: Callable[[Exchange, ApiError], None],
        *,
        max_body_bytes: int,
    ) -> None:
        super().__init__(("127.0.0.1", 0), Exchange)
        self.answer, self.refuse, self.max_body_bytes = answer, refuse, max_body_bytes
        self.failure: Exception | None = None
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=partial(self.serve_forever, poll_interval=0.05), daemon=True)

    def start(self) -> None:
        """Accept connections from now on."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """True while connections are accepted."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Close the port and all connections, after a moment for replies that are on their way."""
        self.shutdown()
        self._thread.join()
        self.server_close()
        self._end_connections(socket.SHUT_RD)
        end = time.monotonic() + STOP_SECONDS
        while self._connections and time.monotonic() < end:
            time.sleep(0.01)
        self._end_connections(socket.SHUT_RDWR)

    def _end_connections(self, how: int) -> None:
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(how)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer the requests of a connection in a thread."""
        with self._lock:
            self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: a client left."""
