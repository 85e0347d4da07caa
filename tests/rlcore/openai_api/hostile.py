"""Requests as bytes, right but for what a test changes, and the replies to them."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from tests.waiting import LONG

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
SAYS = {"role": "user", "content": "1"}
HELLO: Mapping[str, Any] = {"model": "toy", "messages": [SAYS], "max_tokens": 2}
KEY = "@KEY@"  # of the client that sends
JSON = "application/json"


def request(
    path: str = CHAT,
    body: Any = HELLO,
    *lines: str,
    method: str = "POST",
    host: str = "127.0.0.1",
    key: str = KEY,
    length: str | None = None,
    kind: str = JSON,
) -> bytes:
    """A request; ``lines``: further headers. Header of an empty value are left out."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {
        "Host": host,
        "Authorization": key and f"Bearer {key}",
        "Content-Type": kind,
        "Content-Length": str(len(data)) if length is None else length,
    }
    head = [f"{name}: {value}" for name, value in headers.items() if value]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *head, *lines, "", ""]).encode("latin-1") + data


def get(path: str, **more: str) -> bytes:
    return request(path, b"", method="GET", **more)


def chat(**changes: Any) -> bytes:
    return request(CHAT, HELLO | changes)


def messages(*found: Any, **more: Any) -> bytes:
    return chat(messages=list(found), **more)


def plain(**changes: Any) -> bytes:
    return request(PLAIN, {"model": "toy", "prompt": "1", "max_tokens": 2} | changes)


def chunked(*pieces: bytes) -> bytes:
    return request(CHAT, b"".join(pieces), "Transfer-Encoding: chunked", length="")


def connected(address: int | str, sent: bytes = b"", key: str = "") -> socket.socket:
    """A connection to a port, or to a Unix socket.

    Its client sends in the background: some servers refuse before they have read all.
    """
    if isinstance(address, int):
        connection = socket.create_connection(("127.0.0.1", address), timeout=LONG)
    else:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(LONG)
        connection.connect(address)

    def send() -> None:
        with suppress(OSError):
            connection.sendall(sent.replace(KEY.encode(), key.encode()))

    if sent:
        threading.Thread(target=send, daemon=True).start()
    return connection


def exchange(port: int, sent: bytes, key: str) -> tuple[int, Mapping[str, str], bytes]:
    with connected(port, sent, key) as connection, http.client.HTTPResponse(connection) as reply:
        reply.begin()
        return reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read()


def refusal(port: int, sent: bytes, key: str) -> tuple[int, str]:
    """Status and message of a reply; a refusal has the form of OpenAI."""
    status, headers, body = exchange(port, sent, key)
    if status == 200:
        return status, ""
    error = json.loads(body)["error"]
    assert (error.keys(), headers["content-type"]) == ({"message", "type", "param", "code"}, JSON), body
    assert 0 < len(error["message"]) < 1000 and key not in str(error) and "internal" not in str(error)
    return status, error["message"]
