"""Connections of the HTTP front: floods, silence, bodies that are refused, and the end of the server."""

from __future__ import annotations

import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse

from rlcore.openai_api import guard, server
from rlcore.openai_api.guard import Admission, Guard, Limits
from rlcore.openai_api.server import MAX_CONNECTIONS_OF_KEY, ServerThread
from tests.waiting import LONG

KEYS = ("one", "other")
Address = int | str  # a port, or the path of a Unix socket


async def echo(scope: guard.Scope, receive: guard.Receive, send: guard.Send) -> None:
    body = await Request(scope, receive).body()
    await JSONResponse({"size": len(body)})(scope, receive, send)


@contextmanager
def serving(path: Path | None = None, **limits: Any) -> Iterator[int]:
    running = ServerThread(Guard(echo, Admission(allows=KEYS.__contains__), Limits(**limits)))
    port = running.start(path)
    try:
        yield port
    finally:
        running.stop()


def connected(address: Address) -> socket.socket:
    kind = socket.AF_INET if isinstance(address, int) else socket.AF_UNIX
    connection = socket.socket(kind)
    connection.settimeout(300)
    try:
        connection.connect(("127.0.0.1", address) if isinstance(address, int) else address)
    except OSError:
        connection.close()
        raise
    return connection


def head(key: str = KEYS[0], length: int = 0, host: str = "localhost", more: str = "") -> bytes:
    lines = [f"Host: {host}", f"Authorization: Bearer {key}", f"Content-Length: {length}", *filter(None, [more])]
    return ("POST / HTTP/1.1\r\n" + "".join(f"{line}\r\n" for line in lines) + "\r\n").encode()


def status(connection: socket.socket, sent: bytes) -> int:
    """Status of the reply to a request; 0 if the connection was closed instead."""
    found = b""
    try:
        connection.sendall(sent)
        while not found.endswith(b"}"):  # the end of each reply
            found += (piece := connection.recv(65536))
            if not piece:
                return 0
    except ConnectionError:
        return 0
    return int(found.split()[1])


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    """Number of connections that a server may hold."""
    monkeypatch.setattr(server, "max_connections", lambda: 48)
    return 48


def test_silent_connections_leave_room_for_honest_ones(few: int) -> None:
    with serving() as port, ExitStack() as open_ones:
        flood = [open_ones.enter_context(connected(port)) for _ in range(3 * few)]
        for each in flood[-few:]:
            each.sendall(b"POST / HT")
        with connected(port) as honest:
            assert status(honest, head()) == 200
            assert is_closed(flood[0])
            for _ in range(few):
                open_ones.enter_context(connected(port))
            assert status(honest, head()) == 200  # it keeps its connection


def test_a_burst_of_connections_holds_few_files(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    burst, files, made = 400, [], server.Connection.connection_made

    def counted(self: server.Connection, transport: Any) -> None:
        files.append(len(list(Path("/proc/self/fd").iterdir())))
        made(self, transport)

    monkeypatch.setattr(server.Connection, "connection_made", counted)
    running, is_over = ServerThread(Guard(echo, Admission(allows=KEYS.__contains__), Limits())), threading.Event()
    port = running.start()
    with ExitStack() as open_ones:
        running.call_soon(is_over.wait)  # all wait to be accepted
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(burst):
            open_ones.enter_context(connected(port))
        is_over.set()
        with connected(port) as honest:
            assert status(honest, head()) == 200
        running.stop()
    assert len(files) > burst and max(files) - before - burst <= few + 256


def test_a_key_has_a_limited_number_of_connections_and_another_key_is_served(few: int) -> None:
    with serving() as port, ExitStack() as open_ones:
        found = [status(open_ones.enter_context(connected(port)), head()) for _ in range(MAX_CONNECTIONS_OF_KEY + 5)]
        assert found == [200] * MAX_CONNECTIONS_OF_KEY + [429] * 5
        assert [status(open_ones.enter_context(connected(port)), head("other")) for _ in range(20)] == [200] * 20


def test_requests_without_a_key_hold_no_place(few: int) -> None:
    with serving() as port, ExitStack() as open_ones:
        for _ in range(2 * few):
            assert status(open_ones.enter_context(connected(port)), head("guess")) == 401
        assert status(open_ones.enter_context(connected(port)), head()) == 200


def test_the_limit_on_connections_leaves_files_for_the_rest_of_the_process() -> None:
    assert 64 <= server.max_connections() <= max(64, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)


@pytest.mark.parametrize("before", [b"", b"POST / HT", head() + b"POST / HT", head(length=2000) + b"x" * 500])
def test_a_connection_that_stays_silent_within_a_request_is_closed(
    before: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_SILENT_SECONDS", 0.2)
    monkeypatch.setattr(guard, "_DRAIN_SECONDS", 0.1)
    with serving(body_bytes=100) as port, connected(port) as connection:
        connection.sendall(before)
        while connection.recv(65536):
            pass


@pytest.mark.parametrize("is_last", [False, True])
def test_a_body_that_is_too_large_is_read_so_that_its_sender_reads_the_refusal(is_last: bool) -> None:
    more = "Connection: close" if is_last else ""
    with serving(body_bytes=1 << 20) as port, connected(port) as connection:
        assert status(connection, head(length=4 << 20, more=more) + b"x" * (4 << 20)) == 413
        assert is_last or status(connection, head()) == 200


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    with serving(body_seconds=0.3) as port, connected(port) as connection:
        assert status(connection, head(length=100) + b'{"model":') == 408


@pytest.mark.parametrize("length", [10**12, 2 * 10**6])
def test_a_body_that_never_comes_is_refused_by_its_length(length: int) -> None:
    with serving(body_bytes=1 << 20) as port, connected(port) as connection:
        assert status(connection, head(length=length)) == 413


def test_the_server_answers_at_a_unix_socket_too(tmp_path: Path) -> None:
    path = tmp_path / "door"
    with serving(path) as port:
        for address in (port, str(path)):
            with connected(address) as connection:
                assert status(connection, head(length=3) + b"abc") == 200
                assert status(connection, head(host="evil.example")) == 403


def test_the_end_of_the_server_closes_every_connection() -> None:
    with ExitStack() as open_ones:
        with serving() as port:
            waiting = [open_ones.enter_context(connected(port)) for _ in range(3)]
            assert status(waiting[0], head()) == 200
            waiting[1].sendall(head(length=100) + b"x")
        assert all(map(is_closed, waiting))
        with pytest.raises(ConnectionRefusedError):
            connected(port)


@pytest.mark.parametrize("is_last", [False, True])
def test_a_client_that_never_reads_its_reply_holds_no_connection(
    is_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_UNREAD_SECONDS", 0.2)
    ended, lost = threading.Event(), server.Connection.connection_lost

    async def talk(scope: guard.Scope, receive: guard.Receive, send: guard.Send) -> None:
        await JSONResponse({"text": "x" * (32 << 20)})(scope, receive, send)

    def note(self: server.Connection, error: Exception | None) -> None:
        lost(self, error)
        ended.set()

    monkeypatch.setattr(server.Connection, "connection_lost", note)
    running = ServerThread(Guard(talk, Admission(allows=KEYS.__contains__), Limits()))
    with connected(running.start()) as connection:
        connection.sendall(head(more="Connection: close" * is_last))
        assert ended.wait(LONG)
        running.stop()
