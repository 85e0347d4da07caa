"""The gateway over HTTP: sessions, retries, limits and failures, and the desk that shares engine calls."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rlcore.agents.gateway import Desk, Gateway
from rlcore.agents.history import Placement
from rlcore.agents.requests import Request, read_chat
from rlcore.agents.session import Asked, Limits, Made, Session, Ticket
from rlcore.checks.canaries.masks import mask_canary
from rlcore.errors import SamplingError
from rlcore.models.policy import score_sequences
from rlcore.sampling.base import SamplingParams
from rlcore.sampling.native import NativeSampler
from rlcore.text.packing import TokenSequence
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import FailedRollout, Prompt, Rollout
from tests.rlcore.agents.engines import Gated, RandomSampler
from tests.rlcore.agents.gateways import (
    LIMITS,
    Episode,
    answered,
    ask,
    chat,
    connect,
    leaver,
    message_of,
    running,
    sampled,
    scripted,
    user,
)
from tests.waiting import LONG, until

Later = Callable[..., Future[Any]]


@pytest.fixture(scope="module")
def later() -> Iterator[Later]:
    """A function that calls another in a thread of its own."""
    with ThreadPoolExecutor(32) as threads:
        yield threads.submit


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(lambda call: call(), calls))


def test_a_growing_conversation_is_one_sample_with_the_tokens_of_the_chat_template(
    episode: Episode, tokenizer: ChatTokenizer, prompts: list[Prompt]
) -> None:
    with episode("7", "It is 8.") as (gateway, session):
        first = message_of(chat(gateway, session, user("3+4")))
        message_of(chat(gateway, session, user("3+4"), first, user("and one more")))
        record = gateway.close(session)
    rollout = record.rollout
    assert rollout is not None and rollout.branches == () and rollout.prompt.token_ids == prompts[0].token_ids
    template = tokenizer.hf_tokenizer.apply_chat_template
    conversation = [user("3+4"), {"role": "assistant", "content": "7"}, user("and one more")]
    ids = template(conversation, add_generation_prompt=True, return_dict=False)
    assert (*prompts[0].token_ids, *rollout.completion_ids) == (
        *ids,
        *tokenizer.encode("It is 8."),
        *tokenizer.end_of_turn,
    )
    assert (rollout.text, rollout.finish_reason, rollout.num_sampled) == ("It is 8.", "stop", sum(rollout.loss_mask))
    assert [(call.number, call.parent, call.fork) for call in record.calls] == [(1, None, ""), (2, 1, "")]
    mask_canary([rollout], tokenizer.eos_ids)


def test_an_answer_names_the_model_of_the_request_and_counts_its_tokens(
    episode: Episode, prompts: list[Prompt]
) -> None:
    with episode("7") as (gateway, session):
        body = chat(gateway, session, user("3+4"), model="gpt-9", temperature=0, logprobs=True).body
        assert ask(gateway, session, "/v1/models", method="GET").body["data"][0]["id"] == "policy"
        assert ask(gateway, session, "/v1/models/org/name", method="GET").body["id"] == "org/name"
    assert (body["model"], body["choices"][0]["finish_reason"]) == ("gpt-9", "stop")
    assert body["usage"]["prompt_tokens"] == len(prompts[0].token_ids) and body["usage"]["completion_tokens"] == 2
    tokens = body["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in tokens] == ["7", "<|im_end|>"] and all(each["logprob"] < 0 for each in tokens)


def test_a_key_opens_its_own_session_and_no_other(tokenizer: ChatTokenizer, prompts: list[Prompt]) -> None:
    with running(scripted(tokenizer, "3+4", ["7"]), tokenizer) as gateway:
        one, other = (gateway.open(prompts[0], place=0, sample=sample) for sample in (0, 1))
        unknown = chat(gateway, "sk-guess", user("3+4"))
        assert (unknown.status, unknown.code) == (401, "invalid_api_key")
        message_of(chat(gateway, one, user("3+4")))
        assert gateway.close(other).rollout is None and gateway.close(one).rollout is not None
        assert gateway.statistics["unknown_keys"] == 1


def test_a_closed_session_refuses_late_calls_without_a_retry(episode: Episode) -> None:
    with episode("7", "8") as (gateway, session):
        message_of(chat(gateway, session, user("3+4")))
        record = gateway.close(session)
        late = [chat(gateway, session, user("3+4")), ask(gateway, session, "/v1/reward", {"reward": 1})]
        assert [(each.status, each.code, each.headers["x-should-retry"]) for each in late] == [
            (409, "episode_over", "false")
        ] * 2
        assert gateway.statistics["late_calls"] == 2
    assert record.reward is None and len(record.calls) == 1


def test_a_marked_retry_gets_the_recorded_answer_and_an_equal_request_a_new_one(episode: Episode) -> None:
    with episode("7", "8") as (gateway, session):
        replies = [chat(gateway, session, user("3+4"), retry=retry) for retry in (0, 1, 0, 2)]
        record = gateway.close(session)
        assert (gateway.statistics["retries"], gateway.statistics["requests"]) == (2, 2)
    assert [message_of(reply)["content"] for reply in replies] == ["7", "7", "8", "8"]
    assert replies[0].body == replies[1].body and replies[2].body == replies[3].body
    assert record.rollout is not None and record.rollout.text == "8"
    assert [branch.fork for branch in record.rollout.branches] == ["the same request again"]


@contextmanager
def busy(engine: Gated, tokenizer: ChatTokenizer, prompt: Prompt) -> Iterator[tuple[Gateway, Session]]:
    """A gateway whose engine answers another agent until it may, and an agent of whom nothing waits yet."""
    with running(engine, tokenizer) as gateway:
        one, other = (gateway.open(prompt, place=0, sample=sample) for sample in (0, 1))
        with ThreadPoolExecutor(1) as threads:
            threads.submit(chat, gateway, other, user("3+4"))
            assert engine.has_begun.wait(LONG)
            yield gateway, one
            engine.may_answer.set()


def test_a_retry_keeps_a_waiting_call_whose_first_client_left(
    tokenizer: ChatTokenizer, prompts: list[Prompt], later: Later
) -> None:
    engine = Gated(tokenizer)
    with busy(engine, tokenizer, prompts[0]) as (gateway, one):
        leaving = leaver(gateway, one)
        until(lambda: one.asked)
        again = later(ask, gateway, one, "/v1/chat/completions", {"messages": [user("3+4")]}, retry=1)
        until(lambda: one.asked[0].num_readers == 2)
        leaving.close()
        until(lambda: one.asked[0].num_readers == 1)
        engine.may_answer.set()
        assert again.result(LONG).status == 200
    assert engine.batches == [1, 1]


def test_a_client_that_leaves_before_the_engine_begins_costs_nothing(
    tokenizer: ChatTokenizer, prompts: list[Prompt]
) -> None:
    engine = Gated(tokenizer)
    with busy(engine, tokenizer, prompts[0]) as (gateway, one):
        leaving = leaver(gateway, one)
        until(lambda: one.asked)
        leaving.close()
        until(lambda: not one.asked)
    assert gateway.close(one).rollout is None and engine.batches == [1]


def test_an_answer_that_nobody_read_is_in_no_sample(tokenizer: ChatTokenizer, prompts: list[Prompt]) -> None:
    engine = Gated(tokenizer)
    with running(engine, tokenizer) as gateway:
        session = gateway.open(prompts[0], place=0, sample=0)
        leaving = leaver(gateway, session)
        assert engine.has_begun.wait(LONG)
        leaving.close()
        engine.may_answer.set()
        kept = message_of(chat(gateway, session, user("another")))
        record = gateway.close(session)
    assert kept and record.rollout is not None and record.rollout.branches == () and len(record.calls) == 1
    assert sampled(record.rollout) == answered(engine.made[1:])


def test_an_episode_that_ends_while_its_client_has_left_logs_nothing(
    tokenizer: ChatTokenizer, prompts: list[Prompt], caplog: pytest.LogCaptureFixture
) -> None:
    engine = Gated(tokenizer)
    with running(engine, tokenizer) as gateway:
        session = gateway.open(prompts[0], place=0, sample=0)
        leaving = leaver(gateway, session)
        assert engine.has_begun.wait(LONG)
        leaving.close()
        until(lambda: not session.asked or session.asked[0].num_readers == 0)
        gateway.close(session)
        engine.may_answer.set()
        other = gateway.open(prompts[0], place=0, sample=1)
        chat(gateway, other, user("3+4"))
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


def test_agents_that_wait_at_the_same_time_share_an_engine_call(
    tokenizer: ChatTokenizer, prompts: list[Prompt], later: Later
) -> None:
    engine = Gated(tokenizer)
    with running(engine, tokenizer) as gateway:
        sessions = [gateway.open(prompts[0], place=0, sample=sample) for sample in range(9)]
        first = later(chat, gateway, sessions[0], user("1"))
        assert engine.has_begun.wait(LONG)
        others = [later(chat, gateway, each, user("1")) for each in sessions[1:]]
        until(lambda: all(session.asked for session in sessions))
        engine.may_answer.set()
        assert {each.result(LONG).status for each in (first, *others)} == {200}
        assert engine.batches == [1, 8]
        assert (gateway.statistics["engine_calls"], gateway.statistics["requests"]) == (2, 9)


def test_draws_depend_on_the_episode_and_not_on_other_agents(tokenizer: ChatTokenizer, prompts: list[Prompt]) -> None:
    def texts(samples: Sequence[int], **fields: Any) -> dict[int, list[str]]:
        with running(RandomSampler(tokenizer), tokenizer) as gateway:
            sessions = {sample: gateway.open(prompts[0], place=5, sample=sample) for sample in samples}
            calls = [
                lambda each=each: [message_of(chat(gateway, each, user("1"), **fields), n)["content"] for n in (0, 1)]
                for each in sessions.values()
            ]
            return dict(zip(sessions, in_threads(*calls), strict=True))

    alone, together = texts([3], n=2), texts([1, 2, 3, 4], n=2)
    assert alone[3] == together[3] and len({each for pair in together.values() for each in pair}) == 8
    assert texts([3], n=2, temperature=0, seed=9, top_p=0.1, top_k=1, frequency_penalty=2) == alone


def test_a_request_has_the_lower_of_its_own_limit_and_the_room_that_is_left(episode: Episode) -> None:
    with episode(engine=partial(RandomSampler, end_rate=0.0), max_new_tokens=60) as (gateway, session):
        short = chat(gateway, session, user("1"), max_tokens=5)
        assert short.body["choices"][0]["finish_reason"] == "length" and short.body["usage"]["completion_tokens"] == 5
        after = chat(gateway, session, user("1"), message_of(short), user("2"))
        assert after.body["usage"]["completion_tokens"] == 60
        record = gateway.close(session)
    assert record.rollout is not None and record.rollout.finish_reason == "length"
    assert record.calls[1].fork == "the answer before was cut at its limit"
    assert sum(map(sum, (each.loss_mask for each in record.rollout.samples))) == record.rollout.num_sampled == 65


def test_a_conversation_without_room_for_an_answer_is_refused_and_truncates_the_episode(episode: Episode) -> None:
    with episode("7", max_new_tokens=40) as (gateway, session):
        first = message_of(chat(gateway, session, user("3+4")))
        full = chat(gateway, session, user("3+4"), first, user("x" * 40))
        long = chat(gateway, session, user("y" * 1000))
        record = gateway.close(session)
    assert [(each.status, each.code) for each in (full, long)] == [(400, "context_length_exceeded")] * 2
    assert record.rollout is not None and record.rollout.finish_reason == "length" and record.rollout.text == "7"
    assert record.refused == (full.message, long.message)


def test_an_exhausted_episode_is_refused_in_a_way_that_no_client_repeats(episode: Episode) -> None:
    with episode(engine=RandomSampler, max_calls=3) as (gateway, session):
        *_, last = replies = [chat(gateway, session, user("1"), n=n) for n in (2, 2, 1, 1)]
    assert [reply.status for reply in replies] == [200, 403, 200, 403]
    assert (last.code, last.headers["x-should-retry"]) == ("calls_exhausted", "false")


def test_a_prompt_that_the_engine_refuses_beside_longer_answers_is_sampled_with_its_own_limit(
    tokenizer: ChatTokenizer, prompts: list[Prompt]
) -> None:
    class Small(RandomSampler):
        """An engine with room for 100 tokens."""

        def sample(
            self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int, places: Sequence[int] | None = None
        ) -> list[list[Rollout | FailedRollout]]:
            made = super().sample(prompts, params, seed=seed, places=places)
            too_long = [len(prompt.token_ids) + params.max_new_tokens > 100 for prompt in prompts]
            failed = FailedRollout(prompt=prompts[0], reason="prompt and completion need more positions")
            return [[failed] if is_long else group for is_long, group in zip(too_long, made, strict=True)]

    engine = Small(tokenizer)
    with running(engine, tokenizer) as gateway:
        one, other = (gateway.open(prompts[0], place=0, sample=sample) for sample in (0, 1))
        long, short = in_threads(
            lambda: chat(gateway, one, user("1"), max_tokens=200), lambda: chat(gateway, other, user("1"), max_tokens=8)
        )
    assert (long.status, long.code) == (400, "engine_refused") and short.status == 200


def test_a_broken_engine_ends_serving_and_answers_those_who_wait(
    tokenizer: ChatTokenizer, prompts: list[Prompt], later: Later
) -> None:
    class Broken(RandomSampler):
        def sample(self, *_: Any, **__: Any) -> list[list[Rollout | FailedRollout]]:
            raise SamplingError("the engine is broken")

    with Gateway(Broken(tokenizer), tokenizer, LIMITS, temperature=1.0, seed=0) as gateway:
        session = gateway.open(prompts[0], place=0, sample=0)
        waiting = later(chat, gateway, session, user("1"))
        with pytest.raises(SamplingError, match="is broken"):
            gateway.serve(lambda: False)
        replies = [waiting.result(LONG), chat(gateway, session, user("1"))]
    assert [(each.status, each.headers["x-should-retry"]) for each in replies] == [(503, "false")] * 2


def test_leaving_the_gateway_frees_agents_that_still_wait(
    tokenizer: ChatTokenizer, prompts: list[Prompt], later: Later
) -> None:
    with Gateway(RandomSampler(tokenizer), tokenizer, LIMITS, temperature=1.0, seed=0) as gateway:
        session = gateway.open(prompts[0], place=0, sample=0)
        waiting = later(chat, gateway, session, user("1"))  # nobody serves
        until(lambda: session.asked)
        idle = connect(gateway)
        idle.request("GET", "/v1/models", headers={"Authorization": f"Bearer {session.key}"})
        assert idle.getresponse().read()
    assert waiting.result(LONG).status == 409
    assert idle.sock.recv(1) == b""
    idle.close()


def test_a_prompt_that_takes_long_to_read_delays_no_other_agent(
    tokenizer: ChatTokenizer, prompts: list[Prompt], later: Later, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over, located = threading.Event(), Session.located

    def slow(self: Session, request: Request) -> Placement:
        assert self.sample != 0 or is_over.wait(LONG)
        return located(self, request)

    monkeypatch.setattr(Session, "located", slow)
    with running(RandomSampler(tokenizer), tokenizer) as gateway:
        first, *others = (gateway.open(prompts[0], place=0, sample=sample) for sample in range(9))
        held = [later(chat, gateway, first, user(str(number))) for number in range(6)]
        assert all(message_of(chat(gateway, each, user("1"))) for each in others)
        is_over.set()
        assert {each.result(LONG).status for each in held} == {200}
        assert len(gateway.close(first).calls) == 6


def test_the_first_reward_is_final(episode: Episode) -> None:
    with episode("7") as (gateway, session):
        replies = [ask(gateway, session, "/v1/reward", {"reward": each}) for each in (0.25, 7, 0.25, 1)]
        record = gateway.close(session)
    assert [each.status for each in replies] == [200, 400, 200, 409]
    assert replies[-1].message == "the reward is 0.25, and the first one is final"
    assert record.reward == 0.25


def test_recorded_log_probabilities_are_those_of_the_trainer(
    model: PreTrainedModel, stopping: ChatTokenizer, prompts: list[Prompt]
) -> None:
    limits = Limits(max_calls=8, max_new_tokens=80, max_tokens=128)
    with running(NativeSampler(model, stopping), stopping, limits, temperature=0.8, seed=3) as gateway:
        sessions = [gateway.open(prompts[0], place=0, sample=sample) for sample in range(4)]

        def play(number: int) -> Any:
            messages: list[Mapping[str, Any]] = [user("3+4")]
            for text in ("and", "or"):
                reply = chat(gateway, sessions[number], *messages, n=2, max_tokens=10)
                messages += [message_of(reply, 1), user(text)]
            return gateway.close(sessions[number]).rollout

        rollouts = in_threads(*(lambda number=number: play(number) for number in range(4)))
    samples = [sample for rollout in rollouts for sample in rollout.samples]
    assert len(samples) >= 8 and max(len(sample.turns) for sample in samples) == 2
    sequences = [
        TokenSequence(prompt_ids=each.prompt.token_ids, completion_ids=each.completion_ids) for each in samples
    ]
    scores = score_sequences(model, sequences, tokens_per_microbatch=512, temperature=0.8)
    for sample, score in zip(samples, scores, strict=True):
        mask = torch.tensor(sample.loss_mask)
        torch.testing.assert_close(torch.tensor(sample.sampler_logprobs)[mask], score[mask], atol=1e-5, rtol=0)
        assert not any(each for each, own in zip(sample.sampler_logprobs, sample.loss_mask, strict=True) if not own)


def test_equal_requests_have_draws_of_their_own_whichever_of_them_leaves(
    tokenizer: ChatTokenizer, prompts: list[Prompt]
) -> None:
    session = Gateway(RandomSampler(tokenizer), tokenizer, LIMITS, temperature=1.0, seed=0).open(
        prompts[0], place=0, sample=0
    )

    def asked() -> Asked:
        return session.ask(session.located(read_chat({"messages": [user("1")], "n": 2})), "x")

    first, second = asked(), asked()
    session.forget(first)
    third = asked()
    assert len({ticket.draw for each in (second, third) for ticket in each.tickets}) == 4
    session.forget(third)
    assert [ticket.draw for ticket in asked().tickets] == [ticket.draw for ticket in third.tickets]


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
        def _answered(self, prompt: Prompt, place: int, params: SamplingParams) -> Rollout:
            return super()._answered(prompts[1], place, params)

    with pytest.raises(SamplingError, match="did not read the tokens of the request '3\\+4'"):
        Desk(lambda: 1).serve([ticket(prompts[0], [])], Swapped(tokenizer), PARAMS, seed=0)


def test_nobody_is_waited_for_if_all_agents_wait(prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlcore.agents.gateway.GRACE_SECONDS", 2 * LONG)
    monkeypatch.setattr("rlcore.agents.gateway.MAX_GRACE_SECONDS", 2 * LONG)
    desk = Desk(lambda: 2)
    desk.put([ticket(prompts[0], [], owner="a"), ticket(prompts[0], [], owner="b")])
    begun = time.monotonic()
    assert len(desk.take(1.0)) == 2 and time.monotonic() - begun < LONG
    assert desk.take(0.0) == []
