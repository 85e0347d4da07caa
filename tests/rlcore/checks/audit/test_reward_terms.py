"""Rewards, evaluations and the groups of an iteration, computed once more."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest

from rlcore.checks.audit.draws import unselected_rollouts
from rlcore.checks.audit.prompt_checks import expected_prompts, group_errors, prompt_errors, require_groups
from rlcore.checks.audit.reward_terms import RewardAudit, accuracy_errors
from rlcore.config import SamplingConfig
from rlcore.errors import CanaryError
from rlcore.evaluation.intervals import accuracy
from rlcore.loop import HeldOut
from rlcore.loop.prompt_schedule import PromptSchedule
from rlcore.rewards.mix import WeightedReward, WeightedTerm
from rlcore.rewards.user_function import FunctionReward
from rlcore.types import FailedRollout, Prompt, Rollout, Score, ScoredRollout
from tests import strategies

TEXTS = ("a", "bb", "ccc", "dddd")


def rollouts() -> list[Rollout]:
    plain = strategies.scored_rollout(0.0).rollout
    return [dataclasses.replace(plain, text=text) for text in TEXTS]


def lengths(batch: Sequence[Rollout]) -> list[Any]:
    return [float(len(rollout.text)) for rollout in batch]


def part(function: Any, name: str = "own", weight: float = 1.0, **gate: Any) -> WeightedTerm:
    return WeightedTerm(FunctionReward(function, name), weight, **gate)


def faults(reward: WeightedReward, trained: Sequence[ScoredRollout], notes: list[str] | None = None) -> list[Any]:
    audit = RewardAudit(reward, (notes if notes is not None else []).append)
    return [audit.error(item, trained) for item in trained]


def scored(reward: WeightedReward) -> list[ScoredRollout]:
    items = rollouts()
    return [ScoredRollout(rollout=r, score=s) for r, s in zip(items, reward(items), strict=True)]


def changed(item: ScoredRollout, **changes: Any) -> ScoredRollout:
    return dataclasses.replace(item, score=dataclasses.replace(item.score, **changes))


def test_what_was_scored_is_found_again() -> None:
    reward = WeightedReward([part(lengths), part(lambda b: [0.5] * len(b), "half", -2.0, gate=0.4, below_gate=-1.0)])
    assert faults(reward, scored(reward)) == [None] * 4


@pytest.mark.parametrize("turn", [lambda v: -v, lambda v: 1.0 - v, lambda v: v + 1e-3])
def test_another_value_than_the_terms_is_named_with_both(turn: Any) -> None:
    reward = WeightedReward([part(lengths)])
    items = [changed(i, value=turn(i.score.value), terms={"own": turn(i.score.terms["own"])}) for i in scored(reward)]
    assert faults(reward, items)[2] == ("the reward 'own'", "3", f"{turn(3.0):.6g}")


def test_scores_that_were_moved_on_by_one_rollout_are_found() -> None:
    reward = WeightedReward([part(lengths)])
    items = scored(reward)
    moved = [dataclasses.replace(item, score=items[place - 1].score) for place, item in enumerate(items)]
    assert all(faults(reward, moved))


def test_a_sum_with_another_weight_or_behind_another_gate_is_found() -> None:
    weighted = WeightedReward([part(lengths), part(lengths, "again", 0.5)])
    items = [changed(item, value=2.0 * item.score.terms["own"]) for item in scored(weighted)]
    assert faults(weighted, items)[0] == ("the sum of the reward terms", "1.5", "2")
    gated = WeightedReward([part(lengths, gate=2.0, below_gate=-1.0)])
    assert faults(gated, scored(gated)) == [None] * 4
    open_gate = [changed(item, value=item.score.terms["own"]) for item in scored(gated)]
    assert faults(gated, open_gate)[0] == ("the sum of the reward terms", "-1", "1")


def test_a_part_that_was_dropped_from_the_sum_is_found() -> None:
    reward = WeightedReward([part(lengths), part(lengths, "again")])
    items = [changed(item, terms={"own": item.score.terms["own"]}) for item in scored(reward)]
    assert faults(reward, items)[0][0] == "the reward term 'again'"


def test_a_function_that_looks_at_its_whole_batch_is_left_out_with_a_note_and_its_sum_is_still_made() -> None:
    def relative(batch: Sequence[Rollout]) -> list[Any]:
        most = max(len(rollout.text) for rollout in batch)
        return [len(rollout.text) / most for rollout in batch]

    reward, notes = WeightedReward([part(relative)]), list[str]()
    items = scored(reward)
    assert faults(reward, items, notes) == [None] * 4
    assert len(notes) == 1 and "depending on its batch" in notes[0]
    audit = RewardAudit(reward, notes.append)
    audit.error(items[0], items)
    assert audit.error(changed(items[0], value=9.0), items) == ("the sum of the reward terms", "0.25", "9")


def test_a_function_that_gives_its_values_in_another_order_is_an_error() -> None:
    def moved(batch: Sequence[Rollout]) -> list[Any]:
        values = lengths(batch)
        return [*values[1:], values[0]]

    reward = WeightedReward([part(moved)])
    assert faults(reward, scored(reward))[0] == ("the reward 'own'", "1", "2")


def test_a_function_that_answers_otherwise_each_time_is_left_out_with_a_note() -> None:
    draws = random.Random(0)
    reward, notes = WeightedReward([part(lambda b: [draws.random() for _ in b])]), list[str]()
    assert faults(reward, scored(reward), notes) == [None] * 4
    assert "differently each time" in notes[0]


def test_an_unscored_rollout_is_not_compared() -> None:
    reward = WeightedReward([part(lambda b: [None if r.text == "bb" else 1.0 for r in b])])
    items = scored(reward)
    assert items[1].score.value is None
    assert faults(reward, items) == [None] * 4


def test_asking_again_draws_from_nobodys_generator() -> None:
    reward = WeightedReward([part(lambda b: [float(random.random() < 2.0) for _ in b])])
    items = scored(reward)
    random.seed(3)
    expected = random.random()
    random.seed(3)
    faults(reward, items)
    assert random.random() == expected


PROMPTS = [
    Prompt(prompt_id=f"p{n}", messages=(), token_ids=(n,), reference=str(n), task="t", dataset="ab"[n % 2])
    for n in range(8)
]

VALUES: list[float | None] = [1.0, 0.0, 0.6, 1.0, None, 0.5, float("nan"), 1.0]

HELD_OUT = HeldOut(prompts=PROMPTS, verifier=None, correct_from={"b": 0.5})  # type: ignore[arg-type]


def errors(*, groups: Any = None, values: Any = VALUES, **changes: float) -> list[str]:
    made = [[dataclasses.replace(strategies.scored_rollout(0.0).rollout, prompt=each)] for each in PROMPTS]
    made[4] = [FailedRollout(prompt=PROMPTS[4], reason="no room")]  # type: ignore[list-item]
    scores = [Score(value=value, terms={}, error="" if value is not None else "failed") for value in values]
    interval = accuracy([1, 0, 0, 1, 0, 1, 0, 1])
    metrics = {
        "eval/accuracy": 0.5,
        "eval/accuracy_low": interval.low,
        "eval/accuracy_high": interval.high,
        "eval/failed": 1.0,
        "eval/data/a": 0.25,
        "eval/data/b": 0.75,
    }
    return [str(each) for each in accuracy_errors(HELD_OUT, groups or made, scores, metrics | changes)]


def test_metrics_that_are_those_of_the_answers_are_left_alone() -> None:
    assert errors() == []


@pytest.mark.parametrize("name", ["accuracy", "accuracy_low", "accuracy_high", "failed", "data/a", "data/b"])
def test_every_number_of_an_evaluation_is_recomputed(name: str) -> None:
    (error,) = errors(**{f"eval/{name}": 0.9})
    assert error.startswith(f"eval/{name} by 4 right answers of 8: expected ")
    assert error.endswith("found 0.9")


def test_answers_of_other_problems_are_named() -> None:
    made = [[dataclasses.replace(strategies.scored_rollout(0.0).rollout, prompt=each)] for each in PROMPTS]
    (error,) = errors(groups=[made[1], made[0], *made[2:]])
    assert error == "a held-out problem: expected 'p0' with reference '0', found 'p1' with reference '1'"


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


def group_faults(made: Any, asked: Any, config: Any = CONFIG, allowed: int = 0) -> list[str]:
    return [str(error) for error in group_errors(made, asked, config, num_missing=allowed)]


@pytest.mark.parametrize("shares", [{}, {"a": 1.0}, {"a": 2.0, "b": 1.0}, {"b": 0.3, "a": 0.7}])
def test_the_prompts_of_an_iteration_follow_from_those_before(shares: dict[str, float]) -> None:
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
    (error,) = prompt_errors(prompts()[:2], ["p1", "p0"])
    assert str(error) == "the prompts of the iteration: expected 'p1', 'p0', found 'p0', 'p1'"


def test_complete_groups_have_no_error_and_failed_rollouts_may_be_missing() -> None:
    asked = prompts(3)
    made = groups(asked)
    assert group_faults(made, asked) == []
    made[1] = made[1][:1]
    assert group_faults(made, asked, allowed=1) == []
    assert group_faults(made, asked) == ["the sizes of the groups: expected 2 rollouts each, found 2, 1, 2"]


def test_groups_that_were_mixed_lost_or_doubled_are_named() -> None:
    asked = prompts(3)
    made = groups(asked)
    mixed = [list(column) for column in zip(*made, strict=True)] + made[2:]
    assert group_faults(mixed, asked)[0] == "group 1: expected one prompt, 'p0', found 'p0', 'p1', 'p2'"
    assert group_faults(made[:2], asked) == ["groups: expected 3, found 2"]
    assert group_faults([[made[0][0], made[0][0]], *made[1:]], asked)[0].startswith(
        "a rollout is in the training batch twice"
    )
    assert "one prompt, 'p1', found 'p2'" in group_faults([made[0], made[2], made[1]], asked)[0]


def test_a_group_of_a_fresh_prompt_may_stand_in_the_place_of_another_where_groups_are_replaced() -> None:
    replaces = dataclasses.replace(CONFIG, sampling=SamplingConfig(max_new_tokens=4, dynamic_sampling_rounds=1))
    asked = prompts(3)
    made, fresh = groups(asked), groups(prompts()[5:6])
    exchanged = [made[0], fresh[0], made[2]]
    assert group_faults(exchanged, asked, replaces) == []
    assert "found 'p5'" in group_faults(exchanged, asked)[0]
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
