"""Episode of one agent behind its key: calls, retries, limits, and the record that remains."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from starlette.responses import Response

from rlcore.agents.history import CallTree, Node, Placement, episode_of
from rlcore.agents.rendering import TOO_LONG, PromptRenderer, ReplyReader, as_seen
from rlcore.agents.requests import Request, Stored, Turn, response_events, responses_body
from rlcore.errors import shown
from rlcore.openai_api.replies import Piece, Reply, TokenLogprob
from rlcore.openai_api.requests import ApiError, Json
from rlcore.seeding import derive_seed
from rlcore.text.text_parts import Ids
from rlcore.types import FailedRollout, FinishReason, Prompt, Rollout

_MAX_REFUSALS = 20  # that a record has
logger = logging.getLogger(__name__)
Made = Rollout | FailedRollout
_END_OF_PROMPT = 256  # tokens of a prompt that a response template reads


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of an episode.

    Attributes:
        max_new_tokens: Tokens of a sample after its prompt.
        max_tokens: Tokens of a sample, prompt included.
        max_body_bytes: Size of a request.
        max_waiting: Requests that wait for the engine, of all agents.
        reward_range: Least and greatest reward that an agent may post.
    """

    max_calls: int
    max_new_tokens: int
    max_tokens: int
    max_body_bytes: int = 4 << 20
    max_waiting: int = 1024
    reward_range: tuple[float, ...] = (0.0, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """Answer of an episode, for people.

    ``parent``: number of the call that it continues, or None. ``text``: all sampled tokens, decoded.
    """

    number: int
    kind: str
    parent: int | None
    fork: str
    num_prompt_tokens: int
    num_sampled_tokens: int
    seconds: float
    text: str
    finish_reason: FinishReason


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Record:
    """Episode as recorded. Answers that never reached the agent are no part of it.

    Attributes:
        rollout: The sample of the last answer, with its branches; None if the agent never got an answer.
        reward: Reward that the agent posted, or None.
        refused: First errors that the agent got.
    """

    rollout: Rollout | None
    reward: float | None
    calls: tuple[Call, ...]
    refused: tuple[str, ...]
    error: str = ""


@dataclass(eq=False, slots=True)
class Ticket:
    """Waiting request for one completion, of at most ``limit`` tokens.

    ``draw``: number that decides the random draw, whatever else is sampled. ``owner``: agent that waits. ``finish`` is
    called with the completion in the engine's thread.
    """

    prompt: Prompt
    draw: int
    limit: int
    owner: object
    finish: Callable[[Made], None]
    is_started: bool = field(default=False, init=False)


@dataclass(eq=False, slots=True)
class Asked:
    """Request that waits for its answers, and later holds them.

    ``num_readers``: connections that wait. ``sampled_at``: time at which the engine returned.
    ``prompt``: digest of its tokens. ``done``: fails with the :class:`ApiError` of a request that gets no answers.
    """

    digest: str
    placement: Placement
    prompt: str
    numbers: range
    num_prompt_tokens: int
    begun: float = field(default_factory=time.monotonic)
    tickets: list[Ticket] = field(default_factory=list)
    answers: dict[int, Piece] = field(default_factory=dict)
    done: Future[None] = field(default_factory=Future)
    num_readers: int = 1
    sampled_at: float = 0.0
    reply: Response | None = None

    def fail(self, error: ApiError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Shared:
    """Parts of a gateway that its sessions share."""

    renderer: PromptRenderer
    reader: ReplyReader
    limits: Limits
    statistics: Counter[str]
    lock: threading.RLock


class Session:
    """Episode of an agent. The gateway calls its methods one at a time."""

    def __init__(self, prompt: Prompt, shared: Shared, *, place: int, sample: int) -> None:
        self.key = f"sk-{secrets.token_urlsafe(32)}"
        self.prompt, self.place, self.sample = prompt, place, sample
        self.stored = Stored()
        self.is_closed = False
        self.turn = asyncio.Lock()  # of the session's requests, while each is read
        self.asked: list[Asked] = []
        self._shared = shared
        self._tree = CallTree(shared.renderer)
        self._nodes: dict[int, Node] = {}  # by number of the call
        self._calls: dict[int, Call] = {}
        self._delivered: set[int] = set()
        self._draws: Counter[str] = Counter()  # of each prompt, by digest
        self._num_calls = self._last_number = 0
        self._reward: float | None = None
        self._refused: list[str] = []
        self._error = ""
        self._is_cut = False

    def repeated(self, digest: str) -> Asked | None:
        """Return the newest earlier request with this digest, for one more reader."""
        found = next((each for each in reversed(self.asked) if each.digest == digest), None)
        if found:
            self._shared.statistics["retries"] += 1
            found.num_readers += 1
        return found

    def located(self, request: Request) -> Placement:
        """Return the place of a request: its prompt is rendered and tokenized, which takes time.

        Raises:
            ApiError: The chat template cannot write the conversation, or its texts are too long.
        """
        try:
            return self._tree.place(request)
        except ApiError as error:
            self._is_cut |= error.code == TOO_LONG
            raise

    def ask(self, placement: Placement, digest: str) -> Asked:
        """Return a placed request with tickets for the desk.

        Raises:
            ApiError: The episode is exhausted, or the prompt has no room for a token.
        """
        request = placement.request
        limits = self._shared.limits
        if self._num_calls + request.options.n > limits.max_calls:
            self._is_cut = True
            what = f"the episode has had {self._num_calls} of max_calls = {limits.max_calls} answers"
            raise ApiError(403, what, code="calls_exhausted")
        prompt_ids = placement.prompt_ids
        used = len(prompt_ids) - len(placement.root_ids)
        room = min(limits.max_new_tokens - used, limits.max_tokens - len(prompt_ids))
        if room < 1:
            self._is_cut = True
            raise _too_long(len(prompt_ids), used, limits)
        numbers = range(self._last_number + 1, self._last_number + request.options.n + 1)
        self._tree.hold(placement)
        asked = Asked(digest, placement, _digest(prompt_ids), numbers, len(prompt_ids))
        self._num_calls, self._last_number = self._num_calls + request.options.n, numbers[-1]
        limit = min(room, request.options.max_tokens or room)
        asked.tickets = [self._ticket(asked, number, prompt_ids, limit) for number in numbers]
        self.asked.append(asked)
        return asked

    def _ticket(self, asked: Asked, number: int, prompt_ids: Ids, limit: int) -> Ticket:
        name = f"{self.prompt.prompt_id}/{self.sample}/{number}"
        self._draws[asked.prompt] += 1
        return Ticket(
            prompt=replace(self.prompt, prompt_id=name, token_ids=prompt_ids),
            draw=derive_seed(self.place, self.sample, asked.prompt, self._draws[asked.prompt]),
            limit=limit,
            owner=self,
            finish=lambda made: self._finish(asked, number, made),
        )

    def forget(self, asked: Asked) -> None:
        self.asked.remove(asked)
        self._tree.remove(asked.placement)
        self._num_calls -= len(asked.numbers)
        if not any(each.prompt == asked.prompt and each.numbers[0] > asked.numbers[0] for each in self.asked):
            self._draws[asked.prompt] -= len(asked.numbers)  # else a later request has the next draws already

    def _finish(self, asked: Asked, number: int, made: Made) -> None:
        with self._shared.lock:
            if self.is_closed or asked.done.done():
                return
            asked.sampled_at = asked.sampled_at or time.monotonic()
            if isinstance(made, FailedRollout):
                asked.fail(ApiError(400, f"the engine cannot answer: {shown(made.reason)}", code="engine_refused"))
                return
            try:
                asked.answers[number] = self._record(asked, number, made)
            except Exception as error:  # noqa: BLE001 - of one answer: the failure of this episode alone
                asked.fail(self.fail(error))
            if len(asked.answers) == len(asked.numbers):
                asked.done.set_result(None)

    def _record(self, asked: Asked, number: int, made: Rollout) -> Piece:
        shared, placement = self._shared, asked.placement
        request, tokenizer = placement.request, shared.renderer.tokenizer
        made = as_seen(made, request.options.stop, tokenizer)
        turn, is_unparsed = _turn(made, placement, shared, seed=f"{self.place}/{self.sample}/{number}")
        fork = placement.fork
        if number > asked.numbers[0]:
            fork = f"answer {number - asked.numbers[0] + 1} of n = {request.options.n}"
        order = asked.numbers[0]
        self._nodes[number] = Node(number=number, order=order, placement=placement, rollout=made, turn=turn, fork=fork)
        self._calls[number] = Call(
            number=number,
            kind=request.kind,
            parent=placement.parent.number if placement.parent else None,
            fork=fork,
            num_prompt_tokens=asked.num_prompt_tokens,
            num_sampled_tokens=len(made.completion_ids),
            seconds=time.monotonic() - asked.begun,
            text=tokenizer.decode(made.completion_ids),
            finish_reason=made.finish_reason,
        )
        self._is_cut = False
        is_cut = made.finish_reason == "length"
        shared.statistics.update({"calls": 1, "unparsed_calls": is_unparsed, "cut_answers": is_cut})
        return Piece(
            index=number - order,
            text=turn.content,
            num_tokens=len(made.completion_ids),
            logprobs=tuple(
                TokenLogprob(tokenizer.spell([token]), logprob)
                for token, logprob in zip(made.completion_ids, made.sampler_logprobs, strict=True)
            ),
            finish="tool_calls" if turn.calls else made.finish_reason,
            thought=turn.thought,
            calls=turn.calls,
        )

    def written(self, asked: Asked) -> tuple[Json, Iterator[str]]:
        """Return the body of the reply to an answered request, and the events of its stream."""
        request, answers = asked.placement.request, [asked.answers[number] for number in asked.numbers]
        if request.kind == "chat":
            reply = Reply(options=request.options, is_chat=True, num_prompt_tokens=asked.num_prompt_tokens)
            return reply.whole(answers), reply.stream(answers)
        body = responses_body(request, answers[0], asked.num_prompt_tokens)
        self.stored.add(request, answers[0], body)
        return body, response_events(body)

    def set_delivered(self, asked: Asked) -> None:
        """Make the answers of a request part of the episode. Only then can a later request continue them."""
        for number in asked.numbers:
            self._delivered.add(number)
            self._tree.add(self._nodes[number])

    def fail(self, error: Exception) -> ApiError:
        """Make the episode a failed one, log its unexpected exception, and return the error for the agent."""
        logger.error("agents: an episode of %s failed", self.prompt.prompt_id, exc_info=error)
        self._error = self._error or f"internal error of the gateway: {error!r}"
        return ApiError(500, "internal error of the gateway; the episode fails", code="internal_error")

    def set_reward(self, reward: object) -> None:
        """Set the reward; the first one is final.

        Raises:
            ApiError: The episode is over, it is no number in the range, or another was set.
        """
        self.require_open()
        least, most = self._shared.limits.reward_range
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not least <= reward <= most:
            got = f"{shown(reward, max_chars=60)} (sampling.agent.reward_range)"
            raise ApiError(400, f"reward must be a number from {least:g} to {most:g}, not {got}", param="reward")
        if self._reward not in (None, reward):
            raise ApiError(409, f"the reward is {self._reward:g}, and the first one is final", code="reward_is_set")
        self._reward = float(reward)

    def add_refusal(self, message: str) -> None:
        if len(self._refused) < _MAX_REFUSALS:
            self._refused.append(message)

    def require_open(self) -> None:
        """Refuse calls after the end.

        Raises:
            ApiError: The episode is over.
        """
        if self.is_closed:
            raise ApiError(409, "the episode is over", code="episode_over")

    def seal(self) -> Record:
        self.is_closed = True
        numbers = sorted(self._delivered)
        try:
            rollout = self._rollout(numbers)
        except Exception as error:  # noqa: BLE001 - the failure of this episode alone
            self.fail(error)
            rollout = None
        return Record(
            rollout=rollout,
            reward=self._reward,
            calls=tuple(self._calls[number] for number in numbers),
            refused=tuple(self._refused),
            error=self._error,
        )

    def _rollout(self, numbers: Sequence[int]) -> Rollout | None:
        rollout = episode_of(self.prompt, [self._nodes[number] for number in numbers], is_cut=self._is_cut)
        if rollout is None:
            return None
        return replace(rollout, num_sampled=sum(self._calls[each].num_sampled_tokens for each in numbers))


def _turn(made: Rollout, placement: Placement, shared: Shared, *, seed: str) -> tuple[Turn, bool]:
    """Return an answer as the agent sees it, and True if a call in it is malformed."""
    request, tokenizer, ids = placement.request, shared.renderer.tokenizer, made.completion_ids
    sampled = ids[:-1] if ids[-1] in tokenizer.eos_ids else ids
    spelled, unseen = tokenizer.spell(sampled), tokenizer.decode(sampled)[len(made.text) :]
    return shared.reader.read(
        made.text,
        spelled.removesuffix(unseen) if spelled.endswith(unseen) else made.text,
        prompt=tokenizer.spell(made.prompt.token_ids[-_END_OF_PROMPT:]) if shared.reader.parse else "",
        tools=request.tools if made.finish_reason == "stop" and request.may_call else "",
        seed=seed,
    )


def _digest(ids: Ids) -> str:
    return hashlib.sha256(repr(ids).encode()).hexdigest()


def _too_long(num_tokens: int, used: int, limits: Limits) -> ApiError:
    what = (
        f"the conversation has {num_tokens} tokens, {used} of them after its prompt: no room for an answer. "
        f"The limits are {limits.max_tokens} and {limits.max_new_tokens} (sampling.agent.max_prompt_tokens, "
        "sampling.max_new_tokens)"
    )
    return ApiError(400, what, code=TOO_LONG, param="messages")
