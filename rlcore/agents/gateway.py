"""Gateway between agents that speak OpenAI's API and an engine; sessions are opened by the key of a request.

Agents' requests arrive in threads of the HTTP server. They wait at the desk until :meth:`Gateway.serve`, in the
caller's thread, has the engine answer all that wait at once. Sessions change under one lock; the engine works without.
"""

from __future__ import annotations

import hashlib
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlcore.agents.desk import Desk
from rlcore.agents.records import Call, Limits, Record
from rlcore.agents.rendering import PromptRenderer
from rlcore.agents.server import Exchange, GatewayServer
from rlcore.agents.session import Asked, Session, Shared
from rlcore.agents.wire.chat import chat_body, chat_events, read_chat
from rlcore.agents.wire.conversation import ApiError, Json, Request
from rlcore.agents.wire.events import encode_events, response_events
from rlcore.agents.wire.replies import ReplyReader
from rlcore.agents.wire.responses import read_responses, responses_body
from rlcore.environments.call_formats import format_of
from rlcore.errors import SamplingError, shown
from rlcore.sampling.base import Sampler, SamplingParams
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Prompt

__all__ = ["Call", "Gateway", "Limits", "Record", "Session"]
_POLL_SECONDS = 0.02  # for the end of serving
_LISTEN_SECONDS = 0.1  # for a client that left
_COUNTED_AS = {"invalid_api_key": "unknown_keys", "episode_over": "late_calls"}
_PATHS = ("POST /v1/chat/completions", "POST /v1/responses", "POST /v1/reward", "GET /v1/models")


class Gateway:
    """OpenAI-compatible server on this machine in front of an engine; a context manager.

    ``temperature``, ``greedy`` and ``seed`` hold for all answers, whatever agents want. A draw depends on the seed, the
    episode's place and sample, the prompt's tokens and the number of equal prompts before, not on other agents.
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
    ) -> None:
        self._engine, self._seed = engine, seed
        self._params = SamplingParams(
            temperature=temperature, greedy=greedy, max_new_tokens=limits.max_new_tokens, num_samples=1
        )
        self._lock = threading.RLock()
        self._sessions: dict[str, Session] = {}
        self._statistics: Counter[str] = Counter()
        self._overhead_seconds = 0.0
        self._shared = Shared(
            renderer=PromptRenderer.of(tokenizer),
            reader=_reader(tokenizer),
            limits=limits,
            statistics=self._statistics,
            lock=self._lock,
        )
        self._desk = Desk(lambda: sum(not session.is_closed for session in list(self._sessions.values())))
        self._is_broken = False
        self._server = GatewayServer(self.answer, self.refuse, max_body_bytes=limits.max_body_bytes)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self) -> Gateway:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        for session in list(self._sessions.values()):
            if not session.is_closed:
                self.close(session)
        self._server.stop()

    @property
    def statistics(self) -> Mapping[str, float]:
        """Counts since the start, and the seconds that the gateway itself needed."""
        names = ("calls", "forks", "retries", "late_calls", "unparsed_calls", "cut_answers", "refused", "undelivered")
        return {
            **{name: float(self._statistics[name]) for name in (*names, "unknown_keys")},
            "engine_calls": float(self._desk.num_calls),
            "requests": float(self._desk.num_requests),
            "overhead_seconds": self._overhead_seconds,
        }

    def open(self, prompt: Prompt, *, place: int, sample: int) -> Session:
        """Open the session of an episode."""
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
                if not asked.done.is_set():
                    asked.error = ApiError(409, "the episode ended while the call waited", code="episode_ended")
                    asked.done.set()
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
        if error := self._server.failure:
            raise SamplingError(
                f"the gateway could not answer a request: {error!r}", fix="report this: it is a defect of rlcore"
            ) from error

    def _fail_all(self) -> None:
        with self._lock:
            for session in self._sessions.values():
                for asked in session.asked:
                    if not asked.done.is_set():
                        asked.error = _broken()
                        asked.done.set()

    def answer(self, exchange: Exchange) -> None:
        """Answer an HTTP request."""
        session = self._sessions.get(exchange.key)
        try:
            if session is None:
                what = "the API key is of no episode: use the one in OPENAI_API_KEY"
                raise ApiError(401, what, code="invalid_api_key")
            self._answer(exchange, session)
        except ApiError as error:
            self.refuse(exchange, error)

    def refuse(self, exchange: Exchange, error: ApiError) -> None:
        """Count an error and send it."""
        with self._lock:
            self._statistics[_COUNTED_AS.get(error.code, "refused")] += 1
            if session := self._sessions.get(exchange.key):
                session.add_refusal(error.message)
        exchange.reply_error(error)

    def _answer(self, exchange: Exchange, session: Session) -> None:
        match exchange.command, *exchange.parts:
            case ("POST", "v1", "chat", "completions") | ("POST", "v1", "responses"):
                self._complete(exchange, session)
            case ("POST", "v1", "reward"):
                body = exchange.json()
                with self._lock:
                    session.set_reward(body.get("reward"), body.get("parts"))
                exchange.reply_json({"reward": body["reward"]})
            case ("GET", "v1", "models"):
                exchange.reply_json({"object": "list", "data": [_model("policy")]})
            case ("GET", "v1", "models", *name):
                exchange.reply_json(_model("/".join(name)))
            case _:
                what = f"there is no {exchange.command} {shown(exchange.path, max_chars=80)}, only {', '.join(_PATHS)}"
                raise ApiError(404, what, code="unknown_url")

    def _complete(self, exchange: Exchange, session: Session) -> None:
        """Answer a request for completions. Its answers count if the client is there to read them."""
        asked = self._ask(exchange, session)
        put_at = time.monotonic()
        while not asked.done.wait(_LISTEN_SECONDS):
            if not exchange.is_connected():
                self._leave(session, asked)
                return
        with self._lock:
            if asked.error:
                raise asked.error
            session.require_open()
            if not exchange.is_connected():
                return
            body = self._body(session, asked)
            session.set_delivered(asked, is_delivered=True)
            waited = max(asked.sampled_at, put_at) - put_at
            self._overhead_seconds += time.monotonic() - exchange.read_at - waited
        try:
            self._reply(exchange, asked.placement.request, body)
        except OSError:
            with self._lock:
                session.set_delivered(asked, is_delivered=False)

    def _ask(self, exchange: Exchange, session: Session) -> Asked:
        """Put a request on the desk, unless it repeats another."""
        body, is_chat = exchange.json(), exchange.parts[-1] == "completions"
        digest = hashlib.sha256(exchange.parts[-1].encode() + exchange.body).hexdigest()
        limit = self._shared.limits.max_waiting
        with self._lock:
            session.require_open()
            if self._is_broken:
                raise _broken()
            if self._desk.num_waiting >= limit:
                what = f"{limit} requests are waiting, which is the limit"
                raise ApiError(503, what, code="too_many_waiting", may_retry=True)
            request = read_chat(body) if is_chat else read_responses(body, session.stored)
            asked, tickets = session.ask(request, digest, is_retry=exchange.retry_count > 0)
            self._desk.put(tickets)
        return asked

    def _leave(self, session: Session, asked: Asked) -> None:
        """Give up a request whose client is gone, unless another connection waits for it or the engine has begun."""
        with self._lock:
            asked.num_readers -= 1
            if asked.num_readers == 0 and not session.is_closed and self._desk.drop(asked.tickets):
                session.forget(asked)

    def _body(self, session: Session, asked: Asked) -> Json:
        """Return the reply; a repeated request gets the same."""
        if asked.body is None:
            request, answers = asked.placement.request, [asked.answers[number] for number in asked.numbers]
            name = uuid.uuid4().hex
            if request.kind == "chat":
                asked.body = chat_body(request, answers, name)
            else:
                asked.body = responses_body(request, answers[0], name)
                session.stored.add(request, answers[0], asked.body)
        return asked.body

    def _reply(self, exchange: Exchange, request: Request, body: Json) -> None:
        if not request.stream:
            exchange.reply_json(body)
        elif request.kind == "chat":
            exchange.reply_events(encode_events(chat_events(body, include_usage=request.include_usage)))
        else:
            exchange.reply_events(encode_events(response_events(body)))


def _reader(tokenizer: ChatTokenizer) -> ReplyReader:
    backend = tokenizer.hf_tokenizer

    def parse(prompt: str, text: str, tools: Sequence[Any]) -> Mapping[str, Any]:
        found: Mapping[str, Any] = backend.parse_response(text, prefix=prompt, tools=list(tools))
        return found

    has_template = getattr(backend, "response_template", None) is not None
    form = format_of(str(backend.get_chat_template()))
    return ReplyReader(form=form, prefill=tokenizer.prefill, parse=parse if has_template else None)


def _model(name: str) -> Json:
    return {"id": name, "object": "model", "created": 0, "owned_by": "rlcore"}


def _broken() -> ApiError:
    return ApiError(503, "the engine failed; the run ends", code="engine_failed")
