from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.algorithms.resolve import resolve_algorithm
from rlcore.config import KlConfig, SamplingConfig
from rlcore.errors import CheckpointError, ConfigError
from rlcore.loop.prompt_schedule import MIN_KEEP_PROB, PromptSchedule, interleave, mix_cycle
from rlcore.types import Prompt
from tests import strategies


def prompts(count: int) -> list[Prompt]:
    return [Prompt(prompt_id=str(i), messages=(), token_ids=(i,), reference="", task="t") for i in range(count)]


def of(name: str, count: int) -> list[Prompt]:
    return [
        Prompt(prompt_id=f"{name}/{i}", messages=(), token_ids=(i,), reference="", task="t", dataset=name)
        for i in range(count)
    ]


def drawn(turns: PromptSchedule, iterations: range, silent: frozenset[str] = frozenset()) -> list[list[str]]:
    """The prompts of iterations, of which those in ``silent`` give no signal."""
    found = []
    for iteration in iterations:
        found.append([prompt.prompt_id for prompt in turns.prompts_for(iteration)])
        turns.record_signals(iteration, [(name, name not in silent) for name in found[-1]])
    return found


@given(count=st.integers(1, 12), size=st.integers(1, 5), seed=st.integers(0, 99))
def test_every_epoch_shows_every_prompt_once_in_an_order_of_its_own(count: int, size: int, seed: int) -> None:
    pieces = drawn(PromptSchedule(prompts(count), size, seed=seed), range(1, 2 * count + 1))
    found = [name for piece in pieces for name in piece]
    assert sorted(found[:count]) == sorted(found[count : 2 * count]) == sorted(map(str, range(count)))


@given(
    revisit=st.sampled_from([0.0, 0.5, 1.0]),
    silent=st.frozensets(st.integers(0, 9).map(str)),
    killed_after=st.integers(0, 8),
    ahead=st.integers(0, 2),
    shares=st.booleans(),
)
def test_a_run_that_goes_on_from_a_checkpoint_has_the_same_prompts_also_of_iterations_begun(
    revisit: float, silent: frozenset[str], killed_after: int, ahead: int, shares: bool
) -> None:
    pool = [*of("a", 4), *of("b", 3)] if shares else prompts(10)
    gone = frozenset({"a/1", "b/0"}) if shares else silent
    mix = {"a": 2.0, "b": 1.0} if shares else None

    def run(first: int, last: int, turns: PromptSchedule) -> list[list[str]]:
        found = []
        for iteration in range(first, last + 1):
            turns.prompts_for(min(iteration + ahead, 9))
            found += drawn(turns, range(iteration, iteration + 1), gone)
        return found

    straight = run(1, 9, PromptSchedule(pool, 3, seed=1, weights=mix, keep_prob=revisit))
    before, after = (PromptSchedule(pool, 3, seed=1, weights=mix, keep_prob=revisit) for _ in range(2))
    run(1, killed_after, before)
    after.restore(json.loads(json.dumps(before.state())))
    assert run(killed_after + 1, 9, after) == straight[killed_after:]


def test_a_prompt_keeps_its_turn_as_often_as_its_groups_without_signal_say() -> None:
    """One of ten prompts never has a signal. Expected: 1/2, then 1/4, 1/8, and never below 1/16."""
    hits, tries = Counter[int](), Counter[int]()
    for seed in range(400):
        turns, times = PromptSchedule(prompts(10), 1, seed=seed, keep_prob=0.5), 0
        passed_before = passed = iteration = 0
        while times < 7:
            iteration += 1
            (name,) = (prompt.prompt_id for prompt in turns.prompts_for(iteration))
            passed += turns.num_skipped(iteration)
            turns.record_signals(iteration, [(name, name != "7")])
            if name == "7":
                tries[times] += 1 + passed - passed_before
                hits[times] += 1
                times, passed_before = times + 1, passed
    for times in range(7):
        chance = max(MIN_KEEP_PROB, 0.5**times)
        error = (chance * (1 - chance) / tries[times]) ** 0.5
        assert abs(hits[times] / tries[times] - chance) <= 4 * error


def test_a_prompt_that_has_a_signal_again_has_every_turn_again() -> None:
    turns = PromptSchedule(prompts(4), 4, seed=0, keep_prob=0.0)
    drawn(turns, range(1, 2), frozenset("0123"))
    assert turns.state()["zero_signal_streak"] == {"0": 1, "1": 1, "2": 1, "3": 1}
    turns.record_signals(2, [(prompt.prompt_id, True) for prompt in turns.prompts_for(2)])
    seen = set(turns.state()["zero_signal_streak"])
    third = [prompt.prompt_id for prompt in turns.prompts_for(3)]
    assert set("0123") - seen <= set(third)


def test_passing_over_leaves_the_shares_of_data_sets_as_they_are() -> None:
    pool, shares = [*of("a", 5), *of("b", 5)], {"a": 2.0, "b": 1.0}
    turns = PromptSchedule(pool, 6, seed=0, weights=shares, keep_prob=0.0)
    found = drawn(turns, range(1, 30), frozenset(f"a/{i}" for i in range(4)))
    assert all(Counter(name[0] for name in names) == {"a": 4, "b": 2} for names in found)
    late = Counter(name for names in found[10:] for name in names)
    assert late["a/4"] > 5 * max(late[f"a/{i}"] for i in range(4))


def test_a_revisit_of_one_keeps_no_account_and_what_is_closed_is_forgotten() -> None:
    turns = PromptSchedule(prompts(10), 2, seed=0)
    drawn(turns, range(1, 6), frozenset("0123456789"))
    assert turns.state() == {"num_started": 5, "cursors": {"": 10}, "pending": {}, "zero_signal_streak": {}}


def test_an_iteration_that_is_closed_has_no_prompts_any_more() -> None:
    turns = PromptSchedule(prompts(10), 2, seed=0)
    drawn(turns, range(1, 4))
    with pytest.raises(CheckpointError, match=r"iteration 2 was already recorded: .* started 3"):
        turns.prompts_for(2)


@pytest.mark.parametrize(
    ("algorithm", "changes", "problem"),
    [
        ("grpo", {"group_size": 1}, "zero_signal_keep_prob < 1 needs group_size > 1"),
        ("ppo", {}, "ppo does not use zero_signal_keep_prob: with a critic, groups of equal rewards have a signal"),
        (
            "distil",
            {"kl": KlConfig(coefficient=1.0, apply_to="reward")},
            "distil does not use zero_signal_keep_prob",
        ),
    ],
)
def test_where_groups_of_equal_rewards_teach_nothing_is_passed_over(
    algorithm: str, changes: dict[str, object], problem: str
) -> None:
    sampling = SamplingConfig(max_new_tokens=8, zero_signal_keep_prob=0.5)
    with pytest.raises(ConfigError, match=problem):
        resolve_algorithm(strategies.rl_config(algorithm, sampling=sampling, **changes))


@given(weights=st.lists(st.integers(1, 9), min_size=2, max_size=4), first=st.integers(1, 50))
def test_each_data_set_has_its_share_of_any_stretch_to_within_one_prompt(weights: list[int], first: int) -> None:
    shares = {f"d{place}": float(weight) for place, weight in enumerate(weights)}
    pool = [prompt for name in shares for prompt in of(name, 5)]
    turns = PromptSchedule(pool, 40, seed=0, weights=shares)
    found = [prompt.dataset for prompt in turns.prompts_for(first)]
    for name, share in shares.items():
        assert abs(found.count(name) - 40 * share / sum(weights)) <= 2.0


def test_a_data_set_in_a_mix_shows_every_prompt_once_an_epoch() -> None:
    pool, shares = [*of("a", 6), *of("b", 3)], {"a": 3.0, "b": 1.0}
    straight = [
        prompt for prompt in PromptSchedule(pool, 24, seed=1, weights=shares).prompts_for(1) if prompt.dataset == "a"
    ]
    first, second = [[prompt.prompt_id for prompt in straight][place : place + 6] for place in (0, 6)]
    assert sorted(first) == sorted(second) == [f"a/{i}" for i in range(6)]
    assert first != second


def test_the_data_sets_of_a_mix_take_turns() -> None:
    """Shares of 2 to 1: a is furthest behind at first, then b, then a."""
    assert mix_cycle((("a", 2.0), ("b", 1.0)))[:6] == ("a", "b", "a", "a", "b", "a")


def test_replacements_keep_the_shares_until_a_data_set_is_used_up() -> None:
    found = [prompt.dataset for prompt in interleave([*of("a", 5), *of("b", 1)], {"a": 2.0, "b": 1.0})]
    assert found == ["a", "b", "a", "a", "a", "a"]
