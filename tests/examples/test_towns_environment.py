"""The search of an episode: what demonstrations say it finds, it finds."""

from __future__ import annotations

import random

import pytest

from rlcore.environments.base import CallError, ParsedCall, ToolOutput, parse_call
from rlcore.environments.environment import wrap_environment
from rlcore.environments.environment_pool import EnvironmentPool
from rlcore.examples import towns
from rlcore.examples.environments import Towns
from rlcore.types import Message, Prompt
from tests.waiting import LONG


def prompt_of(question: str) -> Prompt:
    asked = (Message(role="user", content=question),)
    return Prompt(prompt_id=question, messages=asked, token_ids=(), reference="", task=towns.TASK)


def test_calls_of_demonstrations_get_the_answers_that_stand_there() -> None:
    made = towns.MADE.demonstrations(random.Random(3), num_train=400, num_eval=40, direct_share=0.0)
    asked = {row["demonstration_id"]: [message["content"] for message in row["messages"]] for row in made}
    worlds = EnvironmentPool(wrap_environment(Towns, {}), timeout_seconds=LONG)
    worlds.reset({key: prompt_of(turns[0]) for key, turns in asked.items()}, dict.fromkeys(asked, (0, 0)))
    calls = {key: call for key, turns in asked.items() if (call := parse_call(turns[1])) is not None}
    assert worlds.answer(calls) == {key: ToolOutput(text=turns[2]) for key, turns in asked.items()}
    worlds.close()


def test_a_search_shows_as_many_passages_as_it_is_told_and_always_the_same() -> None:
    (_, first), (_, second), *_ = towns.passages()
    words = f"{second.partition(':')[0]} {first.partition(':')[0]}".upper()
    assert Towns(num_passages=2).search(words) == Towns(num_passages=2).search(words) == f"{first}\n{second}"
    assert len(Towns(num_passages=5).search("wells").splitlines()) == 5


def test_what_fits_nothing_is_said_and_a_search_without_a_word_is_an_error() -> None:
    assert Towns().search("Atlantis") == "nothing found"
    with pytest.raises(CallError, match="needs a word"):
        Towns().search(" ?! ")
    worlds = EnvironmentPool(wrap_environment(Towns, {}), timeout_seconds=LONG)
    worlds.reset({"a": prompt_of("mills in Atlantis?")}, {"a": (0, 0)})
    said = worlds.answer({"a": ParsedCall(tool="search", argument="[" * 50_000)})["a"]
    assert isinstance(said, ToolOutput)
    assert said.is_error
    worlds.close()
