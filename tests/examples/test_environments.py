"""The environments of the examples: what demonstrations say they answer, they answer; what is refused is told."""

from __future__ import annotations

import random

import pytest

from rlcore.environments.base import CallError, ParsedCall, ToolOutput, parse_call
from rlcore.environments.environment import EnvironmentPool, wrap_environment
from rlcore.examples import stock, towns
from rlcore.examples.environments import Stock, Towns
from rlcore.examples.tool_task import ToolTask
from rlcore.types import Message, Prompt
from tests.waiting import LONG


def prompt_of(question: str) -> Prompt:
    asked = (Message(role="user", content=question),)
    return Prompt(prompt_id=question, messages=asked, token_ids=(), reference="", task="t")


@pytest.mark.parametrize(("task", "environment"), [(stock.MADE, Stock), (towns.MADE, Towns)], ids=["stock", "towns"])
def test_calls_of_demonstrations_get_the_answers_that_stand_there(task: ToolTask, environment: type) -> None:
    made = task.demonstrations(random.Random(3), num_train=200, num_eval=20, direct_share=0.0)
    asked = {row["demonstration_id"]: [message["content"] for message in row["messages"]] for row in made}
    worlds = EnvironmentPool(wrap_environment(environment, {}), timeout_seconds=LONG)
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


@pytest.mark.parametrize(
    ("environment", "tool", "refused", "question", "task"),
    [
        (
            Stock,
            "query",
            ("ATTACH '/etc/passwd' AS x", "SELECT zeroblob(1000000000)", "DROP TABLE stock", "price of 481"),
            "price of 481",
            stock.MADE,
        ),
        (Towns, "search", ("[" * 50_000,), "mills in Fasone?", towns.MADE),
    ],
)
def test_a_refused_call_is_an_error_that_the_policy_reads_and_the_episode_goes_on(
    environment: type, tool: str, refused: tuple[str, ...], question: str, task: ToolTask
) -> None:
    worlds = EnvironmentPool(wrap_environment(environment, {}), timeout_seconds=LONG)
    worlds.reset({"a": prompt_of(question)}, {"a": (0, 0)})
    for argument in refused:
        output = worlds.answer({"a": ParsedCall(tool=tool, argument=argument)})["a"]
        assert isinstance(output, ToolOutput)
        assert output.is_error and output.text.startswith("error: ")
    call = parse_call(task.call(question))
    assert call is not None
    assert worlds.answer({"a": call}) == {"a": ToolOutput(text=str(task.tool_output(question)))}
    worlds.close()


def test_a_search_shows_as_many_passages_as_it_is_told_and_always_the_same() -> None:
    (_, first), (_, second), *_ = towns.passages()
    words = f"{second.partition(':')[0]} {first.partition(':')[0]}".upper()
    assert Towns(num_passages=2).search(words) == Towns(num_passages=2).search(words) == f"{first}\n{second}"
    assert len(Towns(num_passages=5).search("wells").splitlines()) == 5
    assert Towns().search("Atlantis") == "nothing found"
    with pytest.raises(CallError, match="needs a word"):
        Towns().search(" ?! ")
