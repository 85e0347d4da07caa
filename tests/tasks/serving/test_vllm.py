"""The engine that asks a vLLM server, against a server that answers as vLLM does; the real one: tests/integration."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from rlcore.errors import SamplingError
from rlcore.openai_api.guard import Receive, Scope, Send
from rlcore.openai_api.replies import Piece, TokenLogprob
from rlcore.openai_api.requests import Options
from rlcore.openai_api.server import ServerThread, listen
from rlcore.tasks.serving.engine import Job
from rlcore.tasks.serving.vllm import VllmEngine

KEY = "of-the-engine"
OPTIONS = Options(model="toy", n=2, temperature=0.5, seed=2**63 - 1, stop=("x",), top_logprobs=1)
JOB = Job(prompt_ids=(5, 6), max_tokens=3, options=OPTIONS, place=1)
LOGPROBS = {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5, "b": -1.0}], "text_offset": [0]}
EVENTS = (
    {"choices": [{"index": 1, "text": "a", "token_ids": [9], "logprobs": LOGPROBS, "finish_reason": None}]},
    {"choices": [{"index": 0, "text": "é\u2028", "token_ids": [7, 8], "logprobs": None, "finish_reason": "length"}]},
    {"choices": [{"index": 1, "text": "", "token_ids": [1], "logprobs": None, "finish_reason": "stop"}]},
)
PIECES = [
    Piece(index=1, text="a", num_tokens=1, logprobs=(TokenLogprob("a", -0.5, (("a", -0.5), ("b", -1.0))),)),
    Piece(index=0, text="é\u2028", num_tokens=2, finish="length"),
    Piece(index=1, text="", num_tokens=1, finish="stop"),
]


@dataclass
class Stub:
    """A server like vLLM's: what it was asked, and what it answers."""

    events: tuple[Mapping[str, Any], ...] = EVENTS
    status: int = 200
    asked: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        assert (request.headers["authorization"], scope["path"]) == (f"Bearer {KEY}", "/v1/completions")
        self.asked.append(await request.json())
        lines = [f"data: {json.dumps(each, ensure_ascii=False)}\n\n" for each in self.events]
        body = "".join([*lines, "data: [DONE]\n\n"]) if self.status == 200 else '{"error": "no such thing"}'
        await Response(body, self.status)(scope, receive, send)


@pytest.fixture
def stub() -> Iterator[Stub]:
    made = Stub()
    server = ServerThread(made)
    made.url = f"http://127.0.0.1:{server.start()}"
    yield made
    server.stop()


def ask(url: str) -> tuple[list[Piece] | SamplingError, bool]:
    """The pieces of :data:`JOB` or the error, and whether the engine counts as healthy then."""

    async def run() -> tuple[list[Piece] | SamplingError, bool]:
        engine = VllmEngine(url, KEY, "toy", (1, 4))
        try:
            return [piece async for piece in engine.generate(JOB)], engine.is_healthy()
        except SamplingError as error:
            return error, engine.is_healthy()
        finally:
            await engine.close()

    return asyncio.run(run())


def test_a_job_goes_as_token_ids_with_a_whole_distribution_and_its_pieces_come_back(stub: Stub) -> None:
    assert ask(stub.url) == (PIECES, True)
    (question,) = stub.asked
    assert question["prompt"] == [5, 6]
    assert (question["top_p"], question["top_k"], question["min_p"], question["repetition_penalty"]) == (1, 0, 0, 1)
    assert (question["n"], question["max_tokens"], question["temperature"], question["logprobs"]) == (2, 3, 0.5, 1)
    assert (question["stop"], question["stop_token_ids"], question["model"]) == (["x"], [1, 4], "toy")
    assert 0 <= question["seed"] < 2**63


def test_what_the_server_refuses_or_tells_in_its_stream_is_an_error(stub: Stub) -> None:
    stub.status = 400
    error, is_healthy = ask(stub.url)
    assert is_healthy and isinstance(error, SamplingError) and "no such thing" in error.what
    stub.status, stub.events = 200, (EVENTS[0], {"error": {"message": "out of memory"}})
    error, _ = ask(stub.url)
    assert isinstance(error, SamplingError) and "out of memory" in error.what


def test_a_server_that_is_gone_is_an_error_and_no_longer_healthy() -> None:
    with listen("127.0.0.1", 0) as at:
        port = at.getsockname()[1]
    error, is_healthy = ask(f"http://127.0.0.1:{port}")
    assert isinstance(error, SamplingError) and not is_healthy
    assert "does not answer" in error.what
