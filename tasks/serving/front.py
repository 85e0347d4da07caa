"""Application: chat and completions, streamed or not, models, health, metrics.

    app = front(served, engine, token="…", hosts=LOOPBACK, limits=Limits())   # an ASGI application

Rejections have OpenAI's form. Prompts are tokenized here with the model's chat template. They are rejected before any
computation if prompt and completion need more positions than the model has.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from rlcore.errors import ModelError, SamplingError
from rlcore.openai_api import requests as wire
from rlcore.openai_api.guard import Admission, App, Guard, Limits, Receive, Scope, Send, unless_gone
from rlcore.openai_api.replies import Piece, Reply, event, model_card
from rlcore.openai_api.requests import ApiError
from rlcore.tasks.serving.engine import Engine, Job
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Message, Role

logger = logging.getLogger(__name__)
OFFER = wire.Offer(
    max_choices=16,
    max_stops=4,
    refused={
        **wire.UNSUPPORTED,
        "top_p": (wire.only(1), "completions are drawn from the whole distribution, so leave it at 1"),
        "presence_penalty": (wire.only(0), "completions are drawn from the model's distribution, so leave it at 0"),
        "frequency_penalty": (wire.only(0), "completions are drawn from the model's distribution, so leave it at 0"),
        "tools": (wire.only([]), "the answer is text, so describe them in a message"),
        "store": (wire.only(False), "nothing is stored, so remove it"),
        "service_tier": (wire.only("auto", "default"), "there is only one, so remove it"),
        "echo": (wire.only(False), "the reply has no prompt, so remove it"),
        "best_of": (wire.only(1), "ask for n choices and choose yourself"),
        "suffix": (wire.only(""), "only the end of a text is completed, so remove it"),
    },
)
_NAME = "rlcore_serve"
_HEALTH = "/health"  # the one path without a token, for probes
_METRICS = {
    "requests_total": ("counter", "requests by their status"),
    "running": ("gauge", "requests that are being answered"),
    "prompt_tokens_total": ("counter", "tokens of prompts"),
    "completion_tokens_total": ("counter", "tokens of completions"),
}
Handler = Callable[[HttpRequest, AsyncExitStack], Awaitable[Response]]  # the stack is left once the reply is sent


@dataclass(frozen=True, kw_only=True, eq=False)
class Served:
    """Served model: its registered name, another name by which requests may call it, tokenizer, and positions."""

    name: str
    alias: str = ""
    tokenizer: ChatTokenizer
    positions: int


def front(served: Served, engine: Engine, *, token: str, hosts: Sequence[str], limits: Limits) -> App:
    """Return the application behind its guard."""
    app = _Front(served, engine, limits)
    admission = Admission(
        allows=lambda key: secrets.compare_digest(key.encode(), token.encode()),
        hosts=hosts,
        open_paths=(_HEALTH,),
        refused=lambda error, _: app.count(error.status),
    )
    return Guard(app, admission, limits)


class _Front:
    def __init__(self, served: Served, engine: Engine, limits: Limits) -> None:
        self._served, self._engine, self._limits = served, engine, limits
        self._created = int(time.time())
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="tokens")  # a tokenizer is not thread-safe
        self._counts: Counter[str] = Counter()
        self._running = 0
        self._routes: Mapping[str, tuple[str, Handler]] = {
            "/v1/chat/completions": ("POST", partial(self._complete, is_chat=True)),
            "/v1/completions": ("POST", partial(self._complete, is_chat=False)),
            "/v1/models": ("GET", self._models),
            **{f"/v1/models/{name}": ("GET", self._model) for name in (served.name, served.alias) if name},
            _HEALTH: ("GET", self._health),
            "/metrics": ("GET", self._metrics),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def note(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.count(message["status"])
            await send(message)

        try:
            async with AsyncExitStack() as until_sent:
                response = await self._route(HttpRequest(scope, receive), until_sent)
                await response(scope, receive, note)
        except SamplingError as error:
            raise _failed(error) from error

    def count(self, status: int) -> None:
        self._counts[f'requests_total{{status="{status}"}}'] += 1

    async def _route(self, request: HttpRequest, until_sent: AsyncExitStack) -> Response:
        path = request.scope["path"]
        if path not in self._routes:
            raise ApiError(404, f"there is nothing at this path; there is {', '.join(self._routes)}", code="not_found")
        method, handler = self._routes[path]
        if request.method != method:
            response = ApiError(405, f"{path} takes {method} alone", code="method_not_allowed").response
            response.headers["Allow"] = method
            return response
        return await handler(request, until_sent)

    async def _models(self, *_: object) -> Response:
        return JSONResponse({"object": "list", "data": [model_card(self._served.name, self._created)]})

    async def _model(self, *_: object) -> Response:
        return JSONResponse(model_card(self._served.name, self._created))

    async def _health(self, *_: object) -> Response:
        is_healthy = self._engine.is_healthy()
        return JSONResponse({"status": "ok" if is_healthy else "engine failed"}, 200 if is_healthy else 503)

    async def _metrics(self, *_: object) -> Response:
        counts = {"running": self._running, "prompt_tokens_total": 0, "completion_tokens_total": 0} | dict(self._counts)
        lines = []
        for name, (kind, meaning) in _METRICS.items():
            lines += [f"# HELP {_NAME}_{name} {meaning}", f"# TYPE {_NAME}_{name} {kind}"]
            lines += [f"{_NAME}_{key} {value}" for key, value in sorted(counts.items()) if key.startswith(name)]
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    async def _complete(self, request: HttpRequest, until_sent: AsyncExitStack, *, is_chat: bool) -> Response:
        until_sent.enter_context(self._one_more())
        _require_json(request)
        body, loop = await request.body(), asyncio.get_running_loop()
        options, jobs = await loop.run_in_executor(self._reader, lambda: self._read(body, is_chat=is_chat))
        num_prompt_tokens = sum(len(job.prompt_ids) for job in jobs)
        self._counts["prompt_tokens_total"] += num_prompt_tokens
        reply = Reply(options=options, is_chat=is_chat, num_prompt_tokens=num_prompt_tokens)
        if options.stream:
            events = await until_sent.enter_async_context(aclosing(self._events(reply, jobs)))
            return StreamingResponse(events, media_type="text/event-stream")
        return JSONResponse(await unless_gone(request.receive, self._whole(reply, jobs)))

    @contextmanager
    def _one_more(self) -> Iterator[None]:
        if self._running >= self._limits.concurrent:
            what = f"{self._running} requests are active, which is the limit; retry later"
            raise ApiError(429, what, code="too_many_requests", may_retry=True)
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    def _read(self, body: bytes, *, is_chat: bool) -> tuple[wire.Options, list[Job]]:
        fields = wire.read_fields(wire.read_json(body), OFFER)
        options = wire.options_of(fields, is_chat=is_chat)
        messages = [_message(*each) for each in wire.chat_messages(fields, wire.SPOKEN)] if is_chat else []
        texts = () if is_chat else wire.completion_prompts(fields)
        fields.end()
        if options.model not in (self._served.name, self._served.alias):
            what = f"there is no model {options.model[:200]!r} here; there is {self._served.name!r}"
            raise ApiError(404, what, param="model", code="model_not_found")
        if len(texts) * options.n > OFFER.max_choices:
            raise ApiError(400, f"prompts times n may be {OFFER.max_choices} at most", param="n")
        prompts = [self._rendered(messages)] if is_chat else [self._ids(each) for each in texts]
        return options, [
            Job(prompt_ids=ids, max_tokens=self._room(ids, options.max_tokens), options=options, place=place)
            for place, ids in enumerate(prompts)
        ]

    def _rendered(self, messages: Sequence[Message]) -> tuple[int, ...]:
        if len(messages) > self._served.positions:
            raise self._too_long(f"{len(messages)} messages")
        try:
            return self._served.tokenizer.render_prompt(messages)
        except ModelError as error:
            raise ApiError(400, error.what[:500], param="messages") from error

    def _ids(self, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(self._served.tokenizer.hf_tokenizer(prompt).input_ids)
        size = self._served.tokenizer.vocabulary_size
        if not all(0 <= number < size for number in prompt):
            raise ApiError(400, f"prompt has token ids outside of 0 to {size - 1}", param="prompt")
        return prompt

    def _room(self, ids: tuple[int, ...], wanted: int | None) -> int:
        if not ids:
            raise ApiError(400, "the prompt has no tokens", param="prompt")
        left = self._served.positions - len(ids)
        if left < (wanted or 1):
            more = f" and {wanted} of the completion" if wanted else ""
            raise self._too_long(f"{len(ids)} tokens of the prompt{more}")
        return wanted or left

    def _too_long(self, what: str) -> ApiError:
        text = f"{what} need more than the {self._served.positions} positions that the model has"
        return ApiError(400, text, code="context_length_exceeded")

    async def _pieces(self, jobs: Sequence[Job]) -> AsyncGenerator[Piece]:
        for place, job in enumerate(jobs):
            async with aclosing(self._engine.generate(job)) as pieces:
                async for piece in pieces:
                    self._counts["completion_tokens_total"] += piece.num_tokens
                    yield replace(piece, index=place * job.options.n + piece.index)

    async def _whole(self, reply: Reply, jobs: Sequence[Job]) -> dict[str, Any]:
        async with aclosing(self._pieces(jobs)) as pieces:
            return reply.whole([piece async for piece in pieces])

    async def _events(self, reply: Reply, jobs: Sequence[Job]) -> AsyncGenerator[str]:
        sent, num_tokens = Counter[int](), 0
        for each in reply.opening(len(jobs) * reply.options.n):
            yield each
        try:
            async with aclosing(self._pieces(jobs)) as pieces:
                async for piece in pieces:
                    for each in reply.events(piece, offset=sent[piece.index]):
                        yield each
                    sent[piece.index] += len(piece.text)
                    num_tokens += piece.num_tokens
        except SamplingError as error:
            yield event(_failed(error).body)
            return
        for each in reply.closing(num_tokens):
            yield each


def _message(role: Role, content: str, message: wire.Fields) -> Message:
    message.end()
    return Message(role=role, content=content)


def _require_json(request: HttpRequest) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "the body has to be JSON, with the header `Content-Type: application/json`")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "a compressed body is not supported")


def _failed(error: SamplingError) -> ApiError:
    logger.error("%s", error)
    return ApiError(503, error.what, code="engine_failed")
