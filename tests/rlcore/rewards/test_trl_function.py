"""Functions with TRL's parameters: what they are given, what their None means, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlcore.config import RewardTerm
from rlcore.distributed.serialization import decode, encode
from rlcore.errors import ConfigError, RewardError
from rlcore.rewards.mix import WeightedReward, WeightedTerm
from rlcore.rewards.user_function import FunctionReward, import_function
from rlcore.types import Message, Rollout, ToolCall

MODULE = """
SEEN = []

def solved(completions, solution, **columns):
    SEEN.append((completions, solution, columns))
    return [float(text == right) for text, right in zip(completions, solution)]

async def level(prompts, completions, difficulty=None, scale=1.0):
    return [None if each is None else scale * each for each in difficulty]

def graded(completions, completion_ids, reference):
    texts = [turns[-1]["content"] for turns in completions]
    return [len(ids) + (text == right) for text, ids, right in zip(texts, completion_ids, reference)]

def of_trainer(completions, trainer_state): ...
def by_place(completions, *rest): ...
def with_log(completions, log_extra=None, **columns): return [0.0 for _ in completions]
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "trl_style.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "trl_style", raising=False)
    return __import__("trl_style")


def reward(name: str, **options: Any) -> FunctionReward:
    return import_function(RewardTerm(kind=f"trl_style:{name}", options=options), "rewards.0")


@pytest.fixture
def rollouts(make_rollout: Callable[..., Rollout]) -> list[Rollout]:
    made = [make_rollout(text, "7") for text in ("7", "8")]
    rows: tuple[dict[str, Any], ...] = ({"solution": "7", "difficulty": 2}, {"solution": "7", "tag": "x"})
    asked = (Message(role="system", content="Be kind."), Message(role="user", content="3 + 4?"))
    return [
        replace(one, prompt=replace(one.prompt, columns=json.dumps(row), form="text", messages=asked))
        for one, row in zip(made, rows, strict=True)
    ]


def test_texts_and_columns_are_passed_by_name(rollouts: list[Rollout], module: Any) -> None:
    assert [score.value for score in reward("solved")(rollouts)] == [1.0, 0.0]
    assert module.SEEN == [
        (
            ["7", "8"],
            ["7", "7"],
            {"prompts": ["3 + 4?"] * 2, "completion_ids": [[3], [3]], "difficulty": [2, None], "tag": [None, "x"]},
        )
    ]


def test_conversations_are_passed_as_such_with_their_tool_calls(rollouts: list[Rollout], module: Any) -> None:
    call = ToolCall(text="calc", tool="calculator", output="7", is_error=False)
    talk = [replace(one, prompt=replace(one.prompt, form="messages"), tool_calls=(call,)) for one in rollouts]
    reward("solved")(talk)
    ((completions, _, columns),) = module.SEEN
    assert columns["prompts"][0] == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "3 + 4?"}]
    assert [turn["role"] for turn in completions[1]] == ["assistant", "tool", "assistant"]
    assert completions[1][-1] == {"role": "assistant", "content": "8"}
    assert [score.value for score in reward("graded")(talk)] == [2.0, 1.0]


def test_none_means_that_the_reward_does_not_apply(rollouts: list[Rollout]) -> None:
    first, second = reward("level", scale=0.5)(rollouts)
    assert (first.value, second.skipped) == (1.0, ("level",))
    both = WeightedReward([WeightedTerm(reward("level"), 1.0, gate=0.5), WeightedTerm(reward("solved"), 2.0)])
    scores = both(rollouts)
    assert [score.value for score in scores] == [4.0, 0.0]
    assert (scores[1].terms, scores[1].skipped) == ({"solved": 0.0}, ("level",))


def test_an_option_of_the_preset_is_not_replaced_by_a_column_of_its_name(rollouts: list[Rollout]) -> None:
    rows = [replace(one, prompt=replace(one.prompt, columns='{"difficulty": 2, "scale": 9}')) for one in rollouts]
    assert [score.value for score in reward("level", scale=0.5)(rows)] == [1.0, 1.0]


def test_an_option_that_the_function_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="'trl_style:level' has no option 'scal'") as refused:
        reward("level", scal=0.5)
    assert refused.value.fix == "its signature is level(prompts, completions, difficulty=None, scale=1.0)"


def test_a_column_that_the_rows_lack_is_named(rollouts: list[Rollout]) -> None:
    bare = [replace(one, prompt=replace(one.prompt, columns='{"answer": 7}')) for one in rollouts]
    with pytest.raises(RewardError, match="no column 'solution', which solved needs; their columns are answer"):
        reward("solved")(bare)


@pytest.mark.parametrize(
    ("name", "what"),
    [("of_trainer", "needs 'trainer_state' of TRL's trainer"), ("by_place", "takes 'rest' by position")],
)
def test_what_cannot_be_served_is_refused_with_the_reason(name: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        reward(name)


def test_what_the_trainer_adds_keeps_its_default(rollouts: list[Rollout]) -> None:
    assert [score.value for score in reward("with_log")(rollouts)] == [0.0, 0.0]


def test_a_row_is_the_same_in_another_process_and_its_changes_stay_with_the_reader(rollouts: list[Rollout]) -> None:
    (first, _) = decode(encode(rollouts))
    assert first == rollouts[0]
    assert first.row == {"solution": "7", "difficulty": 2}
    first.row["difficulty"] = 5
    assert first.row["difficulty"] == 2
