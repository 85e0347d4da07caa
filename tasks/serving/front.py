"""Application: chat and completions, streamed or not, models, health, metrics.

    app = front(served, engine, token="…", hosts=LOOPBACK, limits=Limits())   # an ASGI application

Rejections have OpenAI's form. Prompts are tokenized here with the model's chat template. They are rejected before any
computation if prompt and completion need more positions than the model has.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from rlcore.errors import ModelError, SamplingError
from rlcore.openai_api.errors import ApiError
from rlcore.openai_api.guard import Admission, App, Guard, Limits, Receive, Scope, Send
from rlcore.openai_api.json_body import read_json
from rlcore.tasks.serving.engine import Engine, Job, Piece
from rlcore.tasks.serving.replies import Gathered, Head, chunk, model_card, opening_chunks, usage_chunk, whole_answer
from rlcore.tasks.serving.requests import ChatRequest, CompletionRequest, read_chat, read_completion
from rlcore.text.tokenization import ChatTokenizer

logger = logging.getLogger(__name__)
_NAME = "rlcore_serve"
_HEALTH = "/health"  # the one path without a token, for probes
_METRICS = {
    "requests_total": ("counter", "requests by their status"),
    "running": ("gauge", "requests that are being answered"),
    "prompt_tokens_total": ("counter", "tokens of prompts"),
    "completion_tokens_total": ("counter", "tokens of completions"),
}
Handler = Callable[[HttpRequest], Awaitable[Response]]
Read = Callable[[Mapping[str, Any]], ChatRequest | CompletionRequest]


@dataclass(frozen=True, kw_only=True, eq=False)
class Served:
    """Served model: its registered name, another name by which requests may call it, tokenizer, and positions."""

    name: str
    alias: str = ""
    tokenizer: ChatTokenizer
    positions: int


def front(served: Served, engine: Engine, *, token: str, hosts: Sequence[str], limits: Limits) -> App:
    """Return the application behind its guard."""
    admission = Admission(
        allows=lambda key: secrets.compare_digest(key.encode(), token.encode()),
        hosts=hosts,
        open_paths=(_HEALTH,),
    )
    return Guard(_Front(served, engine, limits), admission, limits)


class _Front:
    def __init__(self, served: Served, engine: Engine, limits: Limits) -> None:
        self._served, self._engine, self._limits = served, engine, limits
        self._created = int(time.time())
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="tokens")  # a tokenizer is not thread-safe
        self._counts: Counter[str] = Counter()
        self._running = 0
        self._routes: Mapping[str, tuple[str, Handler]] = {
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._completion),
            "/v1/models": ("GET", self._models),
            **{f"/v1/models/{name}": ("GET", self._model) for name in (served.name, served.alias) if name},
            _HEALTH: ("GET", self._health),
            "/metrics": ("GET", self._metrics),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one admitted request."""
        request = HttpRequest(scope, receive)

        async def note(message: Any) -> None:
            if message["type"] == "http.response.start":
                self._counts[f'requests_total{{status="{message["status"]}"}}'] += 1
            await send(message)

        try:
            response = await self._route(request)
        except ApiError as error:
            self._counts[f'requests_total{{status="{error.status}"}}'] += 1
            raise
        except ClientDisconnect:
            return
        except SamplingError as error:
            logger.error("%s", error)
            response = _failed(error).response
        except Exception:
            logger.exception("a request failed")
            response = ApiError(500, "the server failed; see its log", code="internal_error").response
        await response(scope, receive, note)

    async def _route(self, request: HttpRequest) -> Response:
        path = request.scope["path"]
        if path not in self._routes:
            raise ApiError(404, f"there is nothing at this path; there is {', '.join(self._routes)}", code="not_found")
        method, handler = self._routes[path]
        if request.method != method:
            response = ApiError(405, f"{path} takes {method} alone", code="method_not_allowed").response
            response.headers["Allow"] = method
            return response
        return await handler(request)

    async def _models(self, _: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [model_card(self._served.name, self._created)]})

    async def _model(self, _: HttpRequest) -> Response:
        return JSONResponse(model_card(self._served.name, self._created))

    async def _health(self, _: HttpRequest) -> Response:
        is_healthy = self._engine.is_healthy()
        return JSONResponse({"status": "ok" if is_healthy else "engine failed"}, 200 if is_healthy else 503)

    async def _metrics(self, _: HttpRequest) -> Response:
        counts = {"running": self._running, "prompt_tokens_total": 0, "completion_tokens_total": 0} | dict(self._counts)
        lines = []
        for name, (kind, meaning) in _METRICS.items():
            lines += [f"# HELP {_NAME}_{name} {meaning}", f"# TYPE {_NAME}_{name} {kind}"]
            lines += [f"{_NAME}_{key} {value}" for key, value in sorted(counts.items()) if key.startswith(name)]
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    async def _chat(self, request: HttpRequest) -> Response:
        return await self._complete(request, read_chat)

    async def _completion(self, request: HttpRequest) -> Response:
        return await self._complete(request, read_completion)

    async def _complete(self, request: HttpRequest, read: Read) -> Response:
        self._enter()
        is_left_running = False
        try:
            _require_json(request)
            body, loop = await request.body(), asyncio.get_running_loop()
            asked, jobs = await loop.run_in_executor(self._reader, lambda: self._read(body, read))
            self._counts["prompt_tokens_total"] += sum(len(job.prompt_ids) for job in jobs)
            head = Head(request=asked, id=f"cmpl-{secrets.token_hex(12)}", created=int(time.time()))
            if asked.stream:
                is_left_running = True
                return _Stream(self._events(head, jobs), self._leave)
            return JSONResponse(await _unless_gone(request, self._whole(head, jobs)))
        finally:
            if not is_left_running:
                self._leave()

    def _enter(self) -> None:
        if self._running >= self._limits.concurrent:
            what = f"{self._running} requests are active, which is the limit; retry later"
            raise ApiError(429, what, code="too_many_requests", may_retry=True)
        self._running += 1

    def _leave(self) -> None:
        self._running -= 1

    def _read(self, body: bytes, read: Read) -> tuple[ChatRequest | CompletionRequest, list[Job]]:
        """Parse a request into jobs, or raise the reason for its rejection."""
        asked = read(read_json(body))
        if asked.model not in (self._served.name, self._served.alias):
            what = f"there is no model {asked.model[:200]!r} here; there is {self._served.name!r}"
            raise ApiError(404, what, param="model", code="model_not_found")
        return asked, [
            Job(
                prompt_ids=ids,
                max_tokens=self._room(ids, asked.max_tokens),
                num_samples=asked.num_samples,
                temperature=asked.temperature,
                seed=asked.seed,
                place=place,
                stop=asked.stop,
                top_logprobs=asked.top_logprobs,
            )
            for place, ids in enumerate(self._prompts(asked))
        ]

    def _prompts(self, asked: ChatRequest | CompletionRequest) -> list[tuple[int, ...]]:
        tokenizer = self._served.tokenizer
        if isinstance(asked, CompletionRequest):
            return [self._text_ids(each) if isinstance(each, str) else self._known(each) for each in asked.prompts]
        if len(asked.messages) > self._served.positions:
            raise self._too_long(f"{len(asked.messages)} messages")
        try:
            return [tokenizer.render_prompt(asked.messages)]
        except ModelError as error:
            raise ApiError(400, error.what[:500], param="messages", code="invalid_value") from error

    def _text_ids(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text, with special tokens parsed and the tokenizer's prefix."""
        return tuple(self._served.tokenizer.hf_tokenizer(text).input_ids)

    def _known(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        size = self._served.tokenizer.vocabulary_size
        if not all(0 <= number < size for number in ids):
            raise ApiError(
                400, f"prompt has token ids outside of 0 to {size - 1}", param="prompt", code="invalid_value"
            )
        return ids

    def _room(self, ids: tuple[int, ...], wanted: int | None) -> int:
        """Return the number of tokens to generate."""
        if not ids:
            raise ApiError(400, "the prompt has no tokens", param="prompt", code="invalid_value")
        left = self._served.positions - len(ids)
        if left < (wanted or 1):
            more = f" and {wanted} of the completion" if wanted else ""
            raise self._too_long(f"{len(ids)} tokens of the prompt{more}")
        return wanted or left

    def _too_long(self, what: str) -> ApiError:
        text = f"{what} need more than the {self._served.positions} positions that the model has"
        return ApiError(400, text, code="context_length_exceeded")

    async def _pieces(self, jobs: Sequence[Job]) -> AsyncGenerator[tuple[int, Piece]]:
        """Yield the pieces of all jobs in order, each with the number of its choice in the reply."""
        for place, job in enumerate(jobs):
            async with aclosing(self._engine.generate(job)) as pieces:
                async for piece in pieces:
                    self._counts["completion_tokens_total"] += piece.num_tokens
                    yield place * job.num_samples + piece.index, piece

    async def _whole(self, head: Head, jobs: Sequence[Job]) -> dict[str, Any]:
        choices = {index: Gathered() for index in range(sum(job.num_samples for job in jobs))}
        async with aclosing(self._pieces(jobs)) as pieces:
            async for index, piece in pieces:
                choices[index].add(piece)
        return whole_answer(head, choices, sum(len(job.prompt_ids) for job in jobs))

    async def _events(self, head: Head, jobs: Sequence[Job]) -> AsyncGenerator[str]:
        """Yield the lines of a stream. A failure of the engine is its last event."""
        sent: Counter[int] = Counter()
        tokens = 0
        for each in opening_chunks(head, sum(job.num_samples for job in jobs)):
            yield _event(each)
        try:
            async with aclosing(self._pieces(jobs)) as pieces:
                async for index, piece in pieces:
                    yield _event(chunk(head, index, piece, sent[index]))
                    sent[index] += len(piece.text)
                    tokens += piece.num_tokens
        except SamplingError as error:
            logger.error("%s", error)
            yield _event(_failed(error).body)
            return
        if head.request.with_usage:
            yield _event(usage_chunk(head, sum(len(job.prompt_ids) for job in jobs), tokens))
        yield "data: [DONE]\n\n"


class _Stream(StreamingResponse):
    """Stream that reports its end, however it ends."""

    def __init__(self, events: AsyncGenerator[str], over: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._events, self._over = events, over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events):
                await super().__call__(scope, receive, send)
        finally:
            self._over()


def _require_json(request: HttpRequest) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "the body has to be JSON, with the header `Content-Type: application/json`")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "a compressed body is not supported")


async def _unless_gone(request: HttpRequest, answer: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """Return the reply, unless the client has disconnected: then its work ends."""
    working = asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return await working
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


def _failed(error: SamplingError) -> ApiError:
    return ApiError(503, error.what, code="engine_failed")


def _event(value: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
