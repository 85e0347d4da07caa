"""The database of an episode: what demonstrations say it answers, it answers; what is refused is told."""

from __future__ import annotations

import random

from rlcore.environments.base import ParsedCall, ToolOutput, parse_call
from rlcore.environments.environment import wrap_environment
from rlcore.environments.environment_pool import EnvironmentPool
from rlcore.examples import stock
from rlcore.examples.environments import Stock
from rlcore.types import Message, Prompt
from tests.waiting import LONG


def prompt_of(question: str) -> Prompt:
    asked = (Message(role="user", content=question),)
    return Prompt(prompt_id=question, messages=asked, token_ids=(), reference="", task=stock.TASK)


def test_calls_of_demonstrations_get_the_answers_that_stand_there() -> None:
    made = stock.MADE.demonstrations(random.Random(3), num_train=200, num_eval=20, direct_share=0.0)
    asked = {row["demonstration_id"]: [message["content"] for message in row["messages"]] for row in made}
    worlds = EnvironmentPool(wrap_environment(Stock, {}), timeout_seconds=LONG)
    opened = worlds.reset({key: prompt_of(turns[0]) for key, turns in asked.items()}, dict.fromkeys(asked, (0, 0)))
    assert set(opened.values()) == {""}
    calls = {key: call for key, turns in asked.items() if (call := parse_call(turns[1])) is not None}
    assert worlds.answer(calls) == {key: ToolOutput(text=turns[2]) for key, turns in asked.items()}
    worlds.close()


def test_episodes_of_different_questions_have_databases_of_their_own() -> None:
    figures = []
    for question in ("price of 481", "price of 482"):
        episode = Stock()
        episode.reset(prompt_of(question))
        figures.append(episode.query("SELECT * FROM stock"))
        episode.close()
    assert figures[0] != figures[1]


def test_what_is_refused_is_an_error_that_the_policy_reads_and_the_episode_goes_on() -> None:
    worlds = EnvironmentPool(wrap_environment(Stock, {}), timeout_seconds=LONG)
    worlds.reset({"a": prompt_of("price of 481")}, {"a": (0, 0)})
    for query in ("ATTACH '/etc/passwd' AS x", "SELECT zeroblob(1000000000)", "DROP TABLE stock", "price of 481"):
        said = worlds.answer({"a": ParsedCall(tool="query", argument=query)})["a"]
        assert isinstance(said, ToolOutput)
        assert said.is_error
        assert said.text.startswith("error: ")
    call = parse_call(stock.call("price of 481"))
    assert call is not None
    assert worlds.answer({"a": call}) == {"a": ToolOutput(text=str(stock.answer("price of 481")))}
    worlds.close()
