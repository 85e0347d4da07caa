"""A server of chat completions that judges answers, and fails on demand."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rlcore.rewards.judge import JudgeOptions, JudgeReward
from tests.waiting import LONG

Answer = Callable[[Mapping[str, Any]], str]


class Server:
    """Requests and next replies of a test judge: ``faults`` come before ``answer`` is asked."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.faults, self.bodies, self.headers = answer, list[str](), list[Any](), list[Any]()
        self.usage: Any = None
        self.retry_after = ""
        self.connections = set[Any]()
        self.busy = self.most_busy = 0
        self.lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    state: Server
    protocol_version = "HTTP/1.1"  # keeps its connections

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.state.lock:
            self.state.bodies.append(body)
            self.state.headers.append((self.path, dict(self.headers)))
            self.state.connections.add(self.client_address)
            fault = self.state.faults.pop(0) if self.state.faults else ""
            self.state.busy += 1
            self.state.most_busy = max(self.state.most_busy, self.state.busy)
        try:
            self._reply(fault, body)
        except OSError:
            pass  # the client has gone, as it should
        finally:
            with self.state.lock:
                self.state.busy -= 1

    def _reply(self, fault: str, body: Mapping[str, Any]) -> None:
        self.close_connection = fault in ("drip", "hang up", "echo in the status line")
        if fault == "drip of headers":
            for _ in range(200):
                self.wfile.write(b"H" if _ else b"HTTP/1.1 200 OK\r\n")
                self.wfile.flush()
                time.sleep(0.05)
            return
        if fault == "drip":
            self.send_response(200)
            self.end_headers()
            for _ in range(200):
                self.wfile.write(b" ")
                self.wfile.flush()
                time.sleep(0.05)
            return
        if fault == "hang up":
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if fault == "echo in the status line":
            self.wfile.write(f"HTTP/1.1 {self.headers['Authorization']}\r\n\r\n".encode())
            return
        status = int(fault) if fault.isdigit() else 401 if fault == "echo" else 200
        message = {"role": "assistant", "content": None if fault == "null" else self.state.answer(body)}
        reply = {"object": "chat.completion", "choices": [{"index": 0, "message": message}], "usage": self.state.usage}
        whole = json.dumps(reply).encode()
        content = {
            "echo": str(dict(self.headers)).encode(),
            "garbage": b"<html>",
            "list": b"[]",
            "empty": b'{"choices": []}',
            "huge": b"x" * (2 << 20),
            "422": b'{"error": "extra fields: max_completion_tokens"}',
            "400": b'{"error": {"param": "temperature", "message": "Unsupported value"}}',
        }.get(fault, whole)
        self.send_response(status)
        self.send_header("Location", "http://127.0.0.1:9/")
        self.send_header("Content-Length", str(len(content)))
        if fault and self.state.retry_after:
            self.send_header("Retry-After", self.state.retry_after)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        return None


@contextmanager
def serving(answer: Answer) -> Iterator[tuple[Server, str]]:
    state = Server(answer)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"state": state}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield state, f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def nonce_of(body: Mapping[str, Any]) -> str:
    found = re.search(r"\[answer (\w+)\]", body["messages"][-1]["content"])
    assert found is not None
    return found.group(1)


def by_length(body: Mapping[str, Any]) -> str:
    """A judge that gives a point per character of the answer."""
    found = re.search(r"\[answer (\w+)\]\n(.*)\n\[end of answer \1\]", body["messages"][-1]["content"], re.DOTALL)
    assert found is not None
    return f"<rating {found.group(1)}>{len(found.group(2))}</rating>"


def make_judge(base_url: str, **options: Any) -> JudgeReward:
    return JudgeReward(JudgeOptions(**{"base_url": base_url, "model": "m", "timeout_seconds": LONG, **options}))
