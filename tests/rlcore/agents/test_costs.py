"""Requests that are small and ask for much work: each part of it is done once, and away from other agents."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from rlcore.agents import gateway as gateways
from rlcore.agents import history, session
from rlcore.agents.rendering import PromptRenderer
from rlcore.agents.requests import Turn
from rlcore.agents.turns import as_seen
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Prompt, Rollout
from tests.quick import within_seconds
from tests.rlcore.agents.gateways import ADD, RandomSampler, ask, chat, message_of, running, user
from tests.waiting import LONG


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], Counter[str]]:
    """Count the calls of a function of a module."""

    def watch(module: Any, name: str) -> Counter[str]:
        calls, function = Counter[str](), getattr(module, name)

        def counted(*args: Any, **fields: Any) -> Any:
            calls[hashlib.sha256(repr(args).encode()).hexdigest()] += 1
            return function(*args, **fields)

        monkeypatch.setattr(module, name, counted)
        return calls

    return watch


def test_answers_and_later_requests_read_the_conversation_no_further_time(
    tokenizer: ChatTokenizer, prompts: list[Prompt], count: Callable[[Any, str], Counter[str]]
) -> None:
    digests, prompt, turns = count(json, "loads"), count(session, "_digest"), count(history, "_canonical")
    with running(RandomSampler(tokenizer), tokenizer) as gateway:
        agent = gateway.open(prompts[0], place=0, sample=0)
        first = [user(f"{number}") for number in range(30)]
        assert chat(gateway, agent, *first, n=20, max_tokens=3, tools=[ADD]).status == 200
        assert sum(prompt.values()) == 1
        assert sum(turns.values()) <= 30 + 2 * 20
        assert digests.most_common(1)[0][1] <= 4  # the tools
        assert chat(gateway, agent, *first, n=1, max_tokens=3, tools=[ADD]).status == 200
        assert sum(turns.values()) <= 2 * 30 + 3 * 21


def test_a_repeated_request_gets_the_bytes_that_were_written_first(
    tokenizer: ChatTokenizer, prompts: list[Prompt], count: Callable[[Any, str], Counter[str]]
) -> None:
    written = count(session.Session, "written"), count(gateways, "JSONResponse")
    with running(RandomSampler(tokenizer), tokenizer) as gateway:
        agent = gateway.open(prompts[0], place=0, sample=0)
        replies = [chat(gateway, agent, user("1"), logprobs=True, n=4, retry=number) for number in range(4)]
    assert all(each.body == replies[0].body for each in replies)
    assert [sum(each.values()) for each in written] == [1, 1]


def test_a_reward_that_takes_long_to_read_delays_no_other_agent(
    tokenizer: ChatTokenizer, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over, read = threading.Event(), gateways.read_json

    def slow(body: bytes) -> dict[str, Any]:
        assert b"reward" not in body or is_over.wait(LONG)
        return read(body)

    monkeypatch.setattr(gateways, "read_json", slow)
    with running(RandomSampler(tokenizer), tokenizer) as gateway:
        first, other = (gateway.open(prompts[0], place=0, sample=sample) for sample in range(2))
        held = [threading.Thread(target=ask, args=(gateway, first, "/v1/reward", {"reward": 1})) for _ in range(6)]
        for thread in held:
            thread.start()
        assert message_of(chat(gateway, other, user("1")))
        is_over.set()
        for thread in held:
            thread.join(LONG)
        assert gateway.close(first).reward == 1.0


def test_a_stop_string_after_many_broken_characters_is_found_at_once(
    tokenizer: ChatTokenizer, prompts: list[Prompt]
) -> None:
    broken = next(each for each in range(tokenizer.vocabulary_size) if tokenizer.decode([each]) == "\ufffd")
    ids = (*[broken] * 8000, *tokenizer.encode("xyz"))
    made = Rollout(
        prompt=prompts[0],
        completion_ids=ids,
        sampler_logprobs=(-1.0,) * len(ids),
        loss_mask=(True,) * len(ids),
        policy_version=0,
        finish_reason="length",
        text="",
    )
    with within_seconds():
        seen = as_seen(made, ["y"], tokenizer)
    assert seen.completion_ids == ids[:8002] and seen.text == "\ufffd" * 8000 + "x"


def test_a_prompt_of_many_short_messages_is_written_at_once(tokenizer: ChatTokenizer) -> None:
    renderer = PromptRenderer.of(tokenizer, max_tokens=10**7)
    turns = [Turn(role="user", content=f"{number} {'x' * 100}") for number in range(60_000)]
    with within_seconds():
        renderer._render(turns, "")
