"""Receivers outside of the services: a webhook's and a mail server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email import message_from_bytes, policy
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any


@contextmanager
def receiver(port: int) -> Iterator[list[dict[str, Any]]]:
    received: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers["Content-Type"] == "application/json"
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
            """Nothing: the tests' output is pytest's."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield received
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def mailbox(port: int) -> Iterator[list[Message]]:
    received: list[Message] = []

    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(b"220 here\r\n")
            while (line := self.rfile.readline()) and not line.upper().startswith(b"QUIT"):
                if line.upper().startswith(b"DATA"):
                    self.wfile.write(b"354 go ahead\r\n")
                    lines = iter(self.rfile.readline, b".\r\n")
                    received.append(message_from_bytes(b"".join(lines), policy=policy.default))
                self.wfile.write(b"250 fine\r\n")
            self.wfile.write(b"221 bye\r\n")

    server = ThreadingTCPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield received
    finally:
        server.shutdown()
        server.server_close()
