"""Gateway between agents that speak OpenAI's API and an engine; sessions are opened by the key of a request.

Agents' requests arrive in the thread of the HTTP server. They wait at the desk until :meth:`Gateway.serve`, in the
caller's thread, has the engine answer all that wait at once. Sessions change under one lock; bodies are parsed and
prompts tokenized without it, one request of a session at a time.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from rlcore.agents.rendering import PromptRenderer, ReplyReader, cut_to
from rlcore.agents.requests import Kind, Request, read_chat, read_responses
from rlcore.agents.session import Asked, Limits, Made, Record, Session, Shared, Ticket
from rlcore.errors import ModelError, SamplingError, shown
from rlcore.openai_api import guard
from rlcore.openai_api.replies import model_card
from rlcore.openai_api.requests import ApiError, read_json
from rlcore.openai_api.server import ServerThread
from rlcore.sampling.base import Sampler, SamplingParams
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import FailedRollout, Message, Prompt

GRACE_SECONDS = 0.005  # after each request, for the next one
MAX_GRACE_SECONDS = 0.05
_POLL_SECONDS = 0.02  # for the end of serving
_NUM_READERS = 4  # threads that parse and tokenize
_COUNTED_AS = {"invalid_api_key": "unknown_keys", "episode_over": "late_calls"}
_PATHS = ("POST /v1/chat/completions", "POST /v1/responses", "POST /v1/reward", "GET /v1/models")


class Desk:
    """Waiting requests of many agents, which one engine call answers together.

    While the engine works, requests gather for its next call. If it is idle, the first request waits a moment for
    others, unless all of the ``num_agents()`` wait.
    """

    def __init__(self, num_agents: Callable[[], int]) -> None:
        self._num_agents = num_agents
        self._waiting: list[Ticket] = []
        self._changed = threading.Condition()
        self.num_calls = self.num_requests = 0

    def put(self, tickets: Sequence[Ticket]) -> None:
        with self._changed:
            self._waiting.extend(tickets)
            self._changed.notify_all()

    def drop(self, tickets: Iterable[Ticket]) -> bool:
        """Remove waiting requests. Return False, and remove none, if the engine has begun one of them."""
        with self._changed:
            dropped = list(tickets)
            if any(ticket.is_started for ticket in dropped):
                return False
            self._waiting = [ticket for ticket in self._waiting if ticket not in dropped]
            return True

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def take(self, timeout_seconds: float) -> list[Ticket]:
        """Return all waiting requests, after a moment for those that are about to come; none after the timeout."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._waiting, timeout_seconds):
                return []
            end = time.monotonic() + MAX_GRACE_SECONDS
            while len({id(ticket.owner) for ticket in self._waiting}) < self._num_agents():
                left = min(GRACE_SECONDS, end - time.monotonic())
                if left <= 0 or not self._changed.wait(left):
                    break
            taken, self._waiting = self._waiting, []
            for ticket in taken:
                ticket.is_started = True
            return taken

    def serve(self, tickets: Sequence[Ticket], engine: Sampler, params: SamplingParams, *, seed: int) -> None:
        """Sample the completions and finish the tickets. Each completion is cut at its own limit.

        An engine may refuse a prompt for which the largest limit of all leaves no room; it is then sampled again.
        """
        pending = list(tickets)
        while pending:
            largest = max(ticket.limit for ticket in pending)
            groups = engine.sample(
                [ticket.prompt for ticket in pending],
                replace(params, max_new_tokens=largest, num_samples=1),
                seed=seed,
                places=[ticket.draw for ticket in pending],
            )
            self.num_calls, self.num_requests = self.num_calls + 1, self.num_requests + len(pending)
            again = []
            for ticket, (made,) in zip(pending, groups, strict=True):
                if isinstance(made, FailedRollout) and ticket.limit < largest:
                    again.append(ticket)
                else:
                    ticket.finish(_within_limit(ticket, made))
            pending = again


def _within_limit(ticket: Ticket, made: Made) -> Made:
    if isinstance(made, FailedRollout):
        return made
    if made.prompt.token_ids != ticket.prompt.token_ids:
        raise SamplingError(f"the engine did not read the tokens of the request {ticket.prompt.prompt_id!r}")
    if len(made.completion_ids) <= ticket.limit:
        return made
    return replace(cut_to(made, ticket.limit), finish_reason="length")


class Gateway:
    """OpenAI-compatible server on this machine in front of an engine; a context manager.

    ``temperature``, ``greedy`` and ``seed`` hold for all answers. A draw depends on the seed, the episode's place and
    sample, the prompt's tokens and the number of equal prompts before. ``socket``: a path at which it listens too.
    """

    def __init__(
        self,
        engine: Sampler,
        tokenizer: ChatTokenizer,
        limits: Limits,
        *,
        temperature: float,
        greedy: bool = False,
        seed: int,
        socket: Path | None = None,
    ) -> None:
        self._engine, self._seed, self._socket = engine, seed, socket
        self._params = SamplingParams(
            temperature=temperature, greedy=greedy, max_new_tokens=limits.max_new_tokens, num_samples=1
        )
        self._lock = threading.RLock()
        self._sessions: dict[str, Session] = {}
        self._statistics: Counter[str] = Counter()
        self._overhead_seconds = 0.0
        self._desk = Desk(lambda: sum(not session.is_closed for session in list(self._sessions.values())))
        self._is_broken = False
        self._readers = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="gateway")
        admission = guard.Admission(allows=lambda key: key in self._sessions, refused=self._count_refusal)
        app = guard.Guard(self._answer, admission, guard.Limits(seconds=None, body_bytes=limits.max_body_bytes))
        self._server = ServerThread(app)
        self.url = ""  # from the start on
        renderer = PromptRenderer(tokenizer=tokenizer, max_tokens=limits.max_tokens)
        self._shared = Shared(
            renderer=renderer,
            reader=_reader(renderer),
            limits=limits,
            statistics=self._statistics,
            lock=self._lock,
        )

    def __enter__(self) -> Gateway:
        self.url = f"http://127.0.0.1:{self._server.start(self._socket)}/v1"
        return self

    def __exit__(self, *_: object) -> None:
        for session in list(self._sessions.values()):
            if not session.is_closed:
                self.close(session)
        self._server.stop()
        self._readers.shutdown()

    @property
    def statistics(self) -> Mapping[str, float]:
        """Counts since the start, and the seconds that the gateway itself needed."""
        names = ("calls", "retries", "late_calls", "unparsed_calls", "cut_answers", "refused", "unknown_keys")
        return {
            **{name: float(self._statistics[name]) for name in names},
            "engine_calls": float(self._desk.num_calls),
            "requests": float(self._desk.num_requests),
            "overhead_seconds": self._overhead_seconds,
        }

    def open(self, prompt: Prompt, *, place: int, sample: int) -> Session:
        session = Session(prompt, self._shared, place=place, sample=sample)
        with self._lock:
            self._sessions[session.key] = session
        return session

    def close(self, session: Session) -> Record:
        """End a session: its later calls are refused, and its waiting ones dropped."""
        with self._lock:
            record = session.seal()
            for asked in session.asked:
                self._desk.drop(asked.tickets)
                asked.fail(ApiError(409, "the episode ended while the call waited", code="episode_ended"))
        return record

    def serve(self, is_over: Callable[[], bool]) -> None:
        """Answer waiting requests until ``is_over()``, in this thread.

        Raises:
            SamplingError: The engine or the server is broken. All waiting and later requests fail.
        """
        self._is_broken = False
        try:
            while not is_over():
                self._require_working()
                if tickets := self._desk.take(_POLL_SECONDS):
                    self._desk.serve(tickets, self._engine, self._params, seed=self._seed)
            self._require_working()
        except BaseException:
            self._is_broken = True
            self._fail_all()
            raise

    def _require_working(self) -> None:
        if not self._server.is_alive:
            raise SamplingError("the gateway's server ended", fix="the same command resumes the run")

    def _fail_all(self) -> None:
        with self._lock:
            for session in self._sessions.values():
                for asked in session.asked:
                    asked.fail(_broken())

    def _count_refusal(self, error: ApiError, key: str) -> None:
        with self._lock:
            self._statistics[_COUNTED_AS.get(error.code, "refused")] += 1
            if session := self._sessions.get(key):
                session.add_refusal(error.message)

    async def _answer(self, scope: guard.Scope, receive: guard.Receive, send: guard.Send) -> None:
        """Answer an admitted request. An unexpected exception is the failure of its episode alone."""
        session = self._sessions[guard.key_of(scope)]
        try:
            response = await self._respond(HttpRequest(scope, receive), session)
        except (ApiError, ClientDisconnect):
            raise
        except Exception as error:  # noqa: BLE001 - the failure of this episode alone
            with self._lock:
                response = session.fail(error).response
        await response(scope, receive, send)

    async def _respond(self, request: HttpRequest, session: Session) -> Response:
        match request.method, *filter(None, request.scope["path"].split("/")):
            case ("POST", "v1", "chat", "completions"):
                return await self._complete(request, session, "chat")
            case ("POST", "v1", "responses"):
                return await self._complete(request, session, "responses")
            case ("POST", "v1", "reward"):
                data, run = await request.body(), asyncio.get_running_loop().run_in_executor
                async with session.turn:
                    body = await run(self._readers, read_json, data)
                with self._lock:
                    session.set_reward(body.get("reward"))
                return JSONResponse({"reward": body["reward"]})
            case ("GET", "v1", "models"):
                return JSONResponse({"object": "list", "data": [model_card("policy")]})
            case ("GET", "v1", "models", *name):
                return JSONResponse(model_card("/".join(name)))
        path = shown(request.scope["path"], max_chars=80)
        what = f"there is no {request.method} {path}, only {', '.join(_PATHS)}"
        raise ApiError(404, what, code="unknown_url")

    async def _complete(self, request: HttpRequest, session: Session, kind: Kind) -> Response:
        """Answer a request for completions. Its answers count if the client is there to read them."""
        body, read_at = await request.body(), time.monotonic()
        asked = await self._ask(body, session, kind, retry_count=request.headers.get("x-stainless-retry-count", ""))
        put_at, answered = time.monotonic(), asyncio.wrap_future(asked.done)
        answered.add_done_callback(asyncio.Future.exception)  # nobody else reads it if the client has left
        try:
            await guard.unless_gone(request.receive, asyncio.shield(answered))
        except ClientDisconnect:
            with self._lock:
                self._leave(session, asked)
            raise
        with self._lock:
            session.require_open()
            reply = self._reply(session, asked)
            session.set_delivered(asked)
            waited = max(asked.sampled_at, put_at) - put_at
            self._overhead_seconds += time.monotonic() - read_at - waited
        return reply

    async def _ask(self, body: bytes, session: Session, kind: Kind, *, retry_count: str) -> Asked:
        digest = hashlib.sha256(kind.encode() + body).hexdigest()
        run = asyncio.get_running_loop().run_in_executor
        async with session.turn:
            with self._lock:
                session.require_open()
                if retry_count.strip("0") and (earlier := session.repeated(digest)):
                    return earlier
            placement = await run(self._readers, lambda: session.located(_read(body, session, kind)))
            with self._lock:
                session.require_open()
                if self._is_broken:
                    raise _broken()
                limit = self._shared.limits.max_waiting
                if self._desk.num_waiting >= limit:
                    what = f"{limit} requests are waiting, which is the limit"
                    raise ApiError(503, what, code="too_many_waiting", may_retry=True)
                asked = session.ask(placement, digest)
                self._desk.put(asked.tickets)
                return asked

    def _leave(self, session: Session, asked: Asked) -> None:
        """Give up a request whose client is gone, unless another connection waits for it or the engine has begun."""
        asked.num_readers -= 1
        if asked.num_readers == 0 and not session.is_closed and self._desk.drop(asked.tickets):
            session.forget(asked)

    def _reply(self, session: Session, asked: Asked) -> Response:
        if asked.reply is None:
            body, events = session.written(asked)
            if asked.placement.request.options.stream:
                headers = {"Cache-Control": "no-cache"}
                asked.reply = Response("".join(events), media_type="text/event-stream", headers=headers)
            else:
                asked.reply = JSONResponse(body)
        return asked.reply


def _read(body: bytes, session: Session, kind: Kind) -> Request:
    found = read_json(body)
    return read_chat(found) if kind == "chat" else read_responses(found, session.stored)


def _reader(renderer: PromptRenderer) -> ReplyReader:
    backend = renderer.tokenizer.hf_tokenizer

    def parse(prompt: str, text: str, tools: Sequence[Any]) -> Mapping[str, Any]:
        found: Mapping[str, Any] = backend.parse_response(text, prefix=prompt, tools=list(tools))
        return found

    if getattr(backend, "response_template", None) is None:
        return ReplyReader(form=renderer.form, prefill=renderer.tokenizer.prefill)
    _require_parses(parse, renderer.tokenizer)
    return ReplyReader(form=renderer.form, prefill=renderer.tokenizer.prefill, parse=parse)


def _require_parses(parse: Callable[[str, str, Sequence[Any]], Mapping[str, Any]], tokenizer: ChatTokenizer) -> None:
    """Refuse a response template by which every answer would count as a malformed call."""
    prompt = tokenizer.spell(tokenizer.render_prompt([Message(role="user", content="3 + 4")]))
    try:
        parse(prompt, "The sum is 7.", ())
    except Exception as error:  # a template is a program, which may raise anything
        what = f"the tokenizer's response template fails on a plain answer: {shown(repr(error), max_chars=300)}"
        raise ModelError(what, fix="correct response_template in tokenizer_config.json, or remove it") from error


def _broken() -> ApiError:
    return ApiError(503, "the engine failed; the run ends", code="engine_failed")
