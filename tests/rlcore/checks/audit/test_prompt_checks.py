from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rlcore.checks.audit.draws import unselected_rollouts
from rlcore.checks.audit.prompt_checks import expected_prompts, group_errors, prompt_errors, require_groups
from rlcore.config import SamplingConfig
from rlcore.errors import CanaryError
from rlcore.loop.prompt_schedule import PromptSchedule
from rlcore.types import FailedRollout, Prompt, ScoredRollout
from tests import strategies

CONFIG = strategies.rl_config(prompts_per_iteration=3, group_size=2)


def prompts(count: int = 7) -> list[Prompt]:
    return [
        Prompt(prompt_id=f"p{n}", messages=(), token_ids=(1, n), reference="", task="t", dataset="ab"[n % 2])
        for n in range(count)
    ]


def groups(asked: list[Prompt], size: int = 2) -> list[list[ScoredRollout]]:
    def one(prompt: Prompt, number: int) -> ScoredRollout:
        made = strategies.scored_rollout(float(number), prompt_ids=prompt.token_ids, completion_ids=(5, 2))
        return dataclasses.replace(made, rollout=dataclasses.replace(made.rollout, prompt=prompt))

    return [[one(prompt, number) for number in range(size)] for prompt in asked]


def faults(made: Any, asked: Any, config: Any = CONFIG, allowed: int = 0) -> list[str]:
    return [str(fault) for fault in group_errors(made, asked, config, num_missing=allowed)]


@pytest.mark.parametrize("shares", [{}, {"a": 1.0}, {"a": 2.0, "b": 1.0}, {"b": 0.3, "a": 0.7}])
def test_whose_turn_it_is_is_what_the_turns_of_a_run_say(shares: dict[str, float]) -> None:
    turns = PromptSchedule(prompts(), 3, seed=5, weights=shares)
    for iteration in range(1, 30):
        asked = turns.prompts_for(iteration)
        expected = expected_prompts(prompts(), shares, CONFIG, seed=5, iteration=iteration)
        assert expected == [prompt.prompt_id for prompt in asked]
        assert list(prompt_errors(asked, expected)) == []
        turns.record_signals(iteration, ())


def test_turns_that_depend_on_what_was_shown_are_not_foretold_and_others_than_expected_are_named() -> None:
    revisits = dataclasses.replace(CONFIG, sampling=SamplingConfig(max_new_tokens=4, zero_signal_keep_prob=0.5))
    assert expected_prompts(prompts(), {}, revisits, seed=5, iteration=1) is None
    (fault,) = prompt_errors(prompts()[:2], ["p1", "p0"])
    assert str(fault) == "the prompts of the iteration: expected 'p1', 'p0', found 'p0', 'p1'"


def test_sound_groups_have_no_fault_and_rollouts_that_failed_may_be_missing() -> None:
    asked = prompts(3)
    made = groups(asked)
    assert faults(made, asked) == []
    made[1] = made[1][:1]
    assert faults(made, asked, allowed=1) == []
    assert faults(made, asked) == ["the sizes of the groups: expected 2 rollouts each, found 2, 1, 2"]


def test_groups_that_were_mixed_lost_or_doubled_are_named() -> None:
    asked = prompts(3)
    made = groups(asked)
    mixed = [list(column) for column in zip(*made, strict=True)] + made[2:]
    assert faults(mixed, asked)[0] == "group 1: expected one prompt, 'p0', found 'p0', 'p1', 'p2'"
    assert faults(made[:2], asked) == ["groups: expected 3, found 2"]
    assert faults([[made[0][0], made[0][0]], *made[1:]], asked)[0].startswith(
        "a rollout is in the training batch twice"
    )
    assert "one prompt, 'p1', found 'p2'" in faults([made[0], made[2], made[1]], asked)[0]


def test_a_group_of_a_fresh_prompt_may_stand_in_the_place_of_another_where_groups_are_replaced() -> None:
    asked, replaces = (
        prompts(3),
        dataclasses.replace(CONFIG, sampling=SamplingConfig(max_new_tokens=4, dynamic_sampling_rounds=1)),
    )
    made = groups(asked)
    fresh = groups(prompts()[5:6])
    exchanged = [made[0], fresh[0], made[2]]
    assert faults(exchanged, asked, replaces) == []
    assert "found 'p5'" in faults(exchanged, asked)[0]
    drawn = unselected_rollouts(exchanged, [made[1]], asked)
    assert [item.rollout.prompt.prompt_id for _, item in drawn] == ["p0", "p0", "p1", "p1", "p2", "p2"]


def test_an_engine_that_gives_other_groups_than_it_was_asked_for_is_refused() -> None:
    asked = prompts(2)
    sampled: list[list[Any]] = [[item.rollout for item in group] for group in groups(asked)]
    sampled[1][0] = FailedRollout(prompt=asked[1], reason="no room")
    require_groups(sampled, asked, 2)
    with pytest.raises(CanaryError, match="groups of 2, 2 completions, expected 2 of 3"):
        require_groups(sampled, asked, 3)
    with pytest.raises(CanaryError, match="group 1 of prompt 'p0' has completions of 'p1'"):
        require_groups(sampled[::-1], asked, 2)
