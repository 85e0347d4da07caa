"""Rewards that are asked again, one completion alone: what is a fault, and what is a reward of another kind."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest

from rlcore.checks.audit.reward_terms import RewardAudit
from rlcore.rewards.mix import WeightedReward, WeightedTerm
from rlcore.rewards.user_function import FunctionReward
from rlcore.types import Rollout, ScoredRollout
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


def test_a_function_that_gives_its_values_in_another_order_is_a_fault_and_no_reward_of_a_batch() -> None:
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


def test_what_was_not_scored_says_nothing() -> None:
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
