"""The desk: one engine call for all that wait, each answer within its own limit."""

from __future__ import annotations

import threading
import time

import pytest

from rlcore.agents.desk import Desk, Made, Ticket
from rlcore.errors import SamplingError
from rlcore.sampling.base import SamplingParams
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Prompt, Rollout
from tests.rlcore.agents.gateways import RandomSampler
from tests.waiting import LONG

PARAMS = SamplingParams(temperature=1.0, max_new_tokens=999, num_samples=1)


def ticket(prompt: Prompt, done: list[Made], *, limit: int = 8, owner: object = None) -> Ticket:
    return Ticket(prompt=prompt, draw=limit, limit=limit, owner=owner, finish=done.append)


def test_each_answer_of_an_engine_call_is_cut_at_its_own_limit(tokenizer: ChatTokenizer, prompts: list[Prompt]) -> None:
    done: list[Made] = []
    desk, engine = Desk(lambda: 1), RandomSampler(tokenizer, end_rate=0.0)
    desk.serve([ticket(prompts[0], done, limit=limit) for limit in (5, 60)], engine, PARAMS, seed=0)
    assert [len(each.completion_ids) for each in done if isinstance(each, Rollout)] == [5, 60]
    assert [each.finish_reason for each in done if isinstance(each, Rollout)] == ["length", "length"]
    assert (desk.num_calls, desk.num_requests) == (1, 2)
    whole: list[Made] = []
    desk.serve([ticket(prompts[0], whole, limit=5)], engine, PARAMS, seed=0)
    assert isinstance(whole[0], Rollout) and isinstance(done[0], Rollout)
    assert whole[0].completion_ids == done[0].completion_ids


def test_an_engine_that_read_other_tokens_is_an_error(tokenizer: ChatTokenizer, prompts: list[Prompt]) -> None:
    class Swapped(RandomSampler):
        def _answer(self, prompt: Prompt, place: int, params: SamplingParams) -> Rollout:
            return super()._answer(prompts[1], place, params)

    with pytest.raises(SamplingError, match="did not read the tokens of the request '3\\+4'"):
        Desk(lambda: 1).serve([ticket(prompts[0], [])], Swapped(tokenizer), PARAMS, seed=0)


def test_a_request_waits_a_moment_for_agents_that_are_about_to_ask(prompts: list[Prompt]) -> None:
    desk = Desk(lambda: 3)
    first, second = (ticket(prompts[0], [], owner=owner) for owner in ("a", "b"))
    desk.put([first])
    threading.Timer(0.001, desk.put, [[second]]).start()
    assert desk.take(1.0)[0] is first and desk.num_waiting <= 1


def test_nobody_is_waited_for_if_all_agents_wait(prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlcore.agents.desk.GRACE_SECONDS", 2 * LONG)
    monkeypatch.setattr("rlcore.agents.desk.MAX_GRACE_SECONDS", 2 * LONG)
    desk = Desk(lambda: 2)
    desk.put([ticket(prompts[0], [], owner="a"), ticket(prompts[0], [], owner="b")])
    begun = time.monotonic()
    assert len(desk.take(1.0)) == 2 and time.monotonic() - begun < LONG
    assert desk.take(0.0) == []


def test_a_request_can_be_dropped_until_the_engine_begins_it(prompts: list[Prompt]) -> None:
    desk = Desk(lambda: 1)
    one, other = ticket(prompts[0], []), ticket(prompts[0], [])
    desk.put([one, other])
    assert desk.drop([one]) and desk.take(1.0) == [other]
    assert not desk.drop([other])
