from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path

import pytest

from rlcore.errors import DataError, RewardError
from rlcore.sampling.rejection import REASONS, Candidate, Selection
from rlcore.tasks.kinds.rejection.step import demonstration, require_enough
from rlcore.tasks.steps.sampled_answers import is_usable, refuse_failing_grader
from rlcore.tasks.store.storage import read_table
from rlcore.types import Message, Prompt, ScoredRollout
from tests import strategies


def candidate(prompt_id: str, text: str = "Easy.</think>2") -> Candidate:
    return Candidate(
        prompt_id=prompt_id,
        task="sums",
        sample_index=3,
        text=text,
        num_tokens=4,
        value=1.0,
        is_finished=True,
        is_usable=True,
    )


def test_a_demonstration_begins_with_what_the_template_put_into_the_assistants_mouth() -> None:
    messages = (Message(role="system", content="Be brief."), Message(role="user", content="1+1"))
    prompt = Prompt(prompt_id="q", messages=messages, token_ids=(1,), reference="2", task="sums")
    assert demonstration(prompt, candidate("q"), "<think>\n") == {
        "demonstration_id": "q/3",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1"}],
        "completion": "<think>\nEasy.</think>2",
        "reference": "2",
        "task": "sums",
    }


@pytest.mark.parametrize(
    ("text", "usable"),
    [
        ("#### 2", True),
        (" \n", False),
        ("", False),
        ("2<|im_end|>", False),
        ("a\0b", False),
        ("<|im_", True),
        ("\x15\ufffd", False),
    ],
)
def test_a_text_that_the_contract_would_refuse_is_not_usable(text: str, usable: bool) -> None:
    assert is_usable(text, ("<|im_start|>", "<|im_end|>")) is usable


def test_the_calls_of_a_kept_episode_are_turns_before_its_answer() -> None:
    prompt = Prompt(
        prompt_id="q", messages=(Message(role="user", content="1+1"),), token_ids=(1,), reference="2", task="sums"
    )
    kept = dataclasses.replace(candidate("q", "#### 2"), calls=(("<tool:calculator>1+1</tool>", "2"),))
    for role in ("tool", "user"):
        row = demonstration(prompt, kept, "", tool_role=role)
        assert row["messages"] == [
            {"role": "user", "content": "1+1"},
            {"role": "assistant", "content": "<tool:calculator>1+1</tool>"},
            {"role": role, "content": "2"},
        ]
        assert row["completion"] == "#### 2"


def test_answers_that_differ_in_their_calls_alone_are_no_duplicates() -> None:
    with_call = dataclasses.replace(candidate("q", "#### 2"), calls=(("<tool:calculator>1+1</tool>", "2"),))
    assert len({with_call.transcript, candidate("q", "#### 2").transcript}) == 2


def test_too_few_kept_answers_are_an_error_that_says_where_they_went() -> None:
    dropped = dict.fromkeys(REASONS, 0) | {"below_threshold": 7, "truncated": 1}
    with pytest.raises(DataError, match=r"kept 2 of 10 answers: 1 truncated, 7 below_threshold") as caught:
        require_enough(
            Selection(kept=(candidate("a"), candidate("a", "other")), dropped=dropped), 10, where="stages.kept"
        )
    assert "num_samples" in caught.value.fix
    require_enough(Selection(kept=(candidate("a"), candidate("b")), dropped=dropped), 10, where="stages.kept")


def asked(item: ScoredRollout) -> ScoredRollout:
    """The rollout of a prompt with words."""
    prompt = replace(item.rollout.prompt, messages=(Message(role="user", content="1+1"),))
    return replace(item, rollout=replace(item.rollout, prompt=prompt))


def test_a_grader_that_fails_leaves_the_rollouts_that_it_failed_on(tmp_path: Path) -> None:
    chunk = tmp_path / "chunks" / "chunk-00000.parquet"
    good, bad = (asked(strategies.scored_rollout(value)) for value in (1.0, None))
    refuse_failing_grader([[good] * 19, [bad]], chunk)
    assert not list(tmp_path.iterdir())
    groups: list[list[ScoredRollout]] = [[good, bad]]
    with pytest.raises(RewardError, match="1 of 2 rollouts could not be scored") as caught:
        refuse_failing_grader(groups, chunk)
    assert not chunk.exists()
    assert read_table(Path(caught.value.where))["error"].tolist() == ["", bad.score.error]
