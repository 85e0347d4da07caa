"""Concurrency and time, with an engine that never comes to an end by itself."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest

from rlcore.errors import SamplingError
from rlcore.openai_api.guard import Limits
from rlcore.openai_api.replies import Piece
from rlcore.tasks.serving.engine import Job
from tests.tasks.serving.conftest import serving
from tests.tasks.serving.test_malformed import CHAT, chat, exchange, plain, request
from tests.waiting import LONG, given_time, until


class Endless:
    """Says one piece, then nothing; ``closed`` counts jobs that were ended from outside."""

    def __init__(self) -> None:
        self.begun, self.closed = 0, 0

    async def generate(self, job: Job) -> AsyncGenerator[Piece]:
        self.begun += 1
        try:
            yield Piece(index=0, text="once", num_tokens=1)
            await asyncio.Event().wait()
        finally:
            self.closed += 1

    def is_healthy(self) -> bool:
        return True


class Broken:
    """Fails: before anything was said where the prompt is one token, else after a piece."""

    async def generate(self, job: Job) -> AsyncGenerator[Piece]:
        if job.num_samples > 1:
            yield Piece(index=0, text="once", num_tokens=1)
        raise SamplingError("the engine fell over")

    def is_healthy(self) -> bool:
        return False


def opened(port: int, sent: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=LONG)
    connection.sendall(sent)
    return connection


@pytest.fixture
def endless() -> Iterator[Endless]:
    yield Endless()


def test_more_requests_than_may_run_are_told_to_come_again(checkpoint: Path, endless: Endless) -> None:
    with serving(checkpoint, endless, Limits(concurrent=2)) as running:
        held = [opened(running.port, chat()), opened(running.port, chat(stream=True))]
        until(lambda: endless.begun == 2)
        status, headers, body = exchange(running.port, chat())
        assert (status, headers["retry-after"], json.loads(body)["error"]["type"]) == (429, "1", "rate_limit_error")
        assert exchange(running.port, request("GET", "/health"))[0] == 200
        for connection in held:
            connection.close()
        until(lambda: endless.closed == 2)  # whoever leaves ends the work that was done for him
        with opened(running.port, chat()):
            until(lambda: endless.begun == 3)


def test_an_answer_that_takes_too_long_is_a_timeout_and_its_work_ends(checkpoint: Path) -> None:
    def asked(seconds: float) -> tuple[int, bytes, bytes]:
        endless = Endless()
        with serving(checkpoint, endless, Limits(seconds=seconds)) as running:
            status, _, body = exchange_open(running.port, chat())
            with opened(running.port, chat(stream=True)) as connection:
                streamed = b"".join(iter(lambda: connection.recv(65536), b""))
            until(lambda: endless.closed == endless.begun)
        return status, body, streamed

    status, body, streamed = given_time(asked, lambda found: b"once" in found[2], seconds=0.5)
    assert (status, json.loads(body)["error"]["code"]) == (504, "timeout")
    assert b"once" in streamed and b"[DONE]" not in streamed
    assert not streamed.endswith(b"0\r\n\r\n")  # nobody takes a part for the whole


def exchange_open(port: int, sent: bytes) -> tuple[int, bytes, bytes]:
    """As :func:`exchange`, by a client that waits and leaves its side open."""
    with opened(port, sent) as connection:
        answer = b""
        while not (b"\r\n\r\n" in answer and answer.endswith(b"}")):
            part = connection.recv(65536)
            assert part
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), head, body


def test_a_body_that_does_not_come_is_not_waited_for(checkpoint: Path, endless: Endless) -> None:
    with serving(checkpoint, endless, Limits(body_seconds=0.3)) as running:
        slow = request("POST", CHAT, b"", {"Content-Length": "100"}) + b'{"model":'
        status, _, body = exchange_open(running.port, slow)
        assert (status, json.loads(body)["error"]["code"]) == (408, "timeout")
        assert endless.begun == 0


def test_an_engine_that_fails_is_told_of_and_health_says_so(checkpoint: Path) -> None:
    with serving(checkpoint, Broken()) as running:
        status, _, body = exchange(running.port, chat())
        assert (status, json.loads(body)["error"]["code"]) == (503, "engine_failed")
        with opened(running.port, plain(n=2, stream=True)) as connection:
            streamed = b""
            while b"engine_failed" not in streamed:
                part = connection.recv(65536)
                assert part
                streamed += part
        assert b"once" in streamed and b"[DONE]" not in streamed
        assert exchange(running.port, request("GET", "/health"))[0] == 503


def test_requests_at_once_get_each_their_own_answer(checkpoint: Path) -> None:
    with serving(checkpoint, limits=Limits(concurrent=8)) as running:
        alone = [json.loads(exchange(running.port, plain(prompt=str(each), seed=each))[2]) for each in range(6)]
        found: dict[int, str] = {}

        def ask(number: int) -> None:
            body = json.loads(exchange(running.port, plain(prompt=str(number), seed=number))[2])
            found[number] = body["choices"][0]["text"]

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found[number] for number in range(6)] == [each["choices"][0]["text"] for each in alone]
