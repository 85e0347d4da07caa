"""Episode of one agent behind its key: calls, retries, limits, and the record that remains."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from starlette.responses import Response

from rlcore.agents.branches import episode_of
from rlcore.agents.desk import Made, Ticket
from rlcore.agents.history import CallTree, Node, Placement
from rlcore.agents.records import Call, Limits, Record
from rlcore.agents.rendering import TOO_LONG, PromptRenderer
from rlcore.agents.wire.conversation import Answer, Request
from rlcore.agents.wire.replies import ReplyReader, as_seen
from rlcore.agents.wire.responses import Stored
from rlcore.errors import shown
from rlcore.openai_api.errors import ApiError
from rlcore.seeding import derive_seed
from rlcore.text.text_parts import Ids
from rlcore.types import FailedRollout, Prompt, Rollout

_MAX_REFUSALS = 20  # that a record has
logger = logging.getLogger(__name__)
Wake = Callable[[Callable[[], object]], None]
_END_OF_PROMPT = 256  # tokens of a prompt that a response template reads


@dataclass(eq=False, slots=True)
class Asked:
    """Request that waits for its answers, and later holds them.

    ``num_readers``: connections that wait. ``sampled_at``: time at which the engine returned.
    ``prompt``: digest of its tokens. ``wake``: calls a function in the thread of the server, to which ``done`` belongs.
    """

    digest: str
    placement: Placement
    prompt: str
    numbers: range
    wake: Wake
    begun: float = field(default_factory=time.monotonic)
    tickets: list[Ticket] = field(default_factory=list)
    answers: dict[int, Answer] = field(default_factory=dict)
    error: ApiError | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    num_readers: int = 1
    sampled_at: float = 0.0
    reply: Response | None = None

    @property
    def is_answered(self) -> bool:
        """True if it has all answers or an error."""
        return self.error is not None or len(self.answers) == len(self.numbers)

    def fail(self, error: ApiError) -> None:
        """Set the error, unless it is answered."""
        if not self.is_answered:
            self.error = error
            self.wake(self.done.set)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Shared:
    """Parts of a gateway that its sessions share."""

    renderer: PromptRenderer
    reader: ReplyReader
    limits: Limits
    statistics: Counter[str]
    lock: threading.RLock
    wake: Wake


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
        if self._num_calls + request.n > limits.max_calls:
            self._is_cut = True
            what = f"the episode has had {self._num_calls} of max_calls = {limits.max_calls} answers"
            raise ApiError(403, what, code="calls_exhausted")
        prompt_ids = placement.prompt_ids
        used = len(prompt_ids) - len(placement.root_ids)
        room = min(limits.max_new_tokens - used, limits.max_tokens - len(prompt_ids))
        if room < 1:
            self._is_cut = True
            raise _too_long(len(prompt_ids), used, limits)
        numbers = range(self._last_number + 1, self._last_number + request.n + 1)
        self._tree.hold(placement)
        asked = Asked(digest, placement, _digest(prompt_ids), numbers, self._shared.wake)
        self._num_calls, self._last_number = self._num_calls + request.n, numbers[-1]
        limit = min(room, request.max_tokens or room)
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
        """Forget a request that left the desk before the engine had begun it."""
        self.asked.remove(asked)
        self._tree.remove(asked.placement)
        self._num_calls -= len(asked.numbers)
        if not any(each.prompt == asked.prompt and each.numbers[0] > asked.numbers[0] for each in self.asked):
            self._draws[asked.prompt] -= len(asked.numbers)  # else a later request has the next draws already

    def _finish(self, asked: Asked, number: int, made: Made) -> None:
        """Record an answer of the engine, in the engine's thread."""
        with self._shared.lock:
            if self.is_closed:
                return
            asked.sampled_at = asked.sampled_at or time.monotonic()
            if isinstance(made, FailedRollout):
                asked.error = ApiError(400, f"the engine cannot answer: {shown(made.reason)}", code="engine_refused")
            else:
                try:
                    asked.answers[number] = self._record(asked, number, made)
                except Exception as error:  # noqa: BLE001 - of one answer: the failure of this episode alone
                    asked.error = self.fail(error)
            if asked.is_answered:
                asked.wake(asked.done.set)

    def _record(self, asked: Asked, number: int, made: Rollout) -> Answer:
        shared, placement = self._shared, asked.placement
        request, tokenizer = placement.request, shared.renderer.tokenizer
        made = as_seen(made, request.stop, tokenizer)
        answer, is_unparsed = _answer(made, placement, shared, seed=f"{self.place}/{self.sample}/{number}")
        fork = placement.fork
        if number > asked.numbers[0]:
            fork = f"answer {number - asked.numbers[0] + 1} of n = {request.n}"
        order = asked.numbers[0]
        self._nodes[number] = Node(
            number=number, order=order, placement=placement, rollout=made, turn=answer.turn, fork=fork
        )
        self._calls[number] = Call(
            number=number,
            kind=request.kind,
            parent=placement.parent.number if placement.parent else None,
            fork=fork,
            num_prompt_tokens=answer.num_prompt_tokens,
            num_sampled_tokens=len(made.completion_ids),
            seconds=time.monotonic() - asked.begun,
            text=tokenizer.decode(made.completion_ids),
            finish_reason=made.finish_reason,
        )
        self._is_cut = False
        counts = {"calls": 1, "forks": bool(fork), "unparsed_calls": is_unparsed}
        shared.statistics.update(counts | {"cut_answers": made.finish_reason == "length"})
        return answer

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
        """Record an error that the agent gets."""
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
        """End the episode and return its record."""
        self.is_closed = True
        numbers = sorted(self._delivered)
        self._shared.statistics["undelivered"] += len(self._nodes) - len(numbers)
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


def _answer(made: Rollout, placement: Placement, shared: Shared, *, seed: str) -> tuple[Answer, bool]:
    """Return an answer as the agent sees it, and True if a call in it is malformed. A cut turn is not a call."""
    request, tokenizer, ids = placement.request, shared.renderer.tokenizer, made.completion_ids
    sampled = ids[:-1] if ids[-1] in tokenizer.eos_ids else ids
    spelled, unseen = tokenizer.spell(sampled), tokenizer.decode(sampled)[len(made.text) :]
    prompt_ids, is_whole = made.prompt.token_ids, made.finish_reason == "stop"
    turn, is_unparsed = shared.reader.read(
        made.text,
        spelled.removesuffix(unseen) if spelled.endswith(unseen) else made.text,
        prompt=tokenizer.spell(prompt_ids[-_END_OF_PROMPT:]) if shared.reader.parse else "",
        tools=request.tools if is_whole and request.may_call else "",
        seed=seed,
    )
    answer = Answer(
        turn=turn,
        finish="tool_calls" if turn.calls else "stop" if is_whole else "length",
        num_prompt_tokens=len(prompt_ids),
        tokens=tuple(zip(map(tokenizer.spell, zip(ids, strict=True)), made.sampler_logprobs, strict=True)),
    )
    return answer, is_unparsed


def _digest(ids: Ids) -> str:
    return hashlib.sha256(repr(ids).encode()).hexdigest()


def _too_long(num_tokens: int, used: int, limits: Limits) -> ApiError:
    what = (
        f"the conversation has {num_tokens} tokens, {used} of them after its prompt: no room for an answer. "
        f"The limits are {limits.max_tokens} and {limits.max_new_tokens} (sampling.agent.max_prompt_tokens, "
        "sampling.max_new_tokens)"
    )
    return ApiError(400, what, code=TOO_LONG, param="messages")
