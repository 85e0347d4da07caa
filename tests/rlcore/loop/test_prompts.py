"""Prompts of an iteration: their schedule, dynamic sampling, and the groups that are collected."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.algorithms.table import resolve_algorithm
from rlcore.config import KlConfig, RolloutCorrectionConfig, SamplingConfig, UpdateConfig
from rlcore.errors import CheckpointError, ConfigError, RewardError
from rlcore.loop.prompt_schedule import (
    MIN_KEEP_PROB,
    PromptSchedule,
    SampledGroups,
    interleave,
    replace_groups,
    unused_prompts,
)
from rlcore.loop.rollouts import collect_groups, group_has_signal, replacement_metrics
from rlcore.metrics import check_names
from rlcore.sampling.base import SamplingParams
from rlcore.types import FailedRollout, Prompt, Rollout, Score
from tests import strategies


def prompt(number: int, dataset: str = "") -> Prompt:
    name = f"{dataset}/{number}".removeprefix("/")
    return Prompt(prompt_id=name, messages=(), token_ids=(number,), reference="", task="t", dataset=dataset)


def prompts(count: int) -> list[Prompt]:
    return list(map(prompt, range(count)))


def of(name: str, count: int) -> list[Prompt]:
    return [prompt(number, name) for number in range(count)]


def drawn(turns: PromptSchedule, iterations: range, silent: frozenset[str] = frozenset()) -> list[list[str]]:
    """The prompts of iterations, of which those in ``silent`` give no signal."""
    found = []
    for iteration in iterations:
        found.append([prompt.prompt_id for prompt in turns.prompts_for(iteration)])
        turns.record_signals(iteration, [(name, name not in silent) for name in found[-1]])
    return found


@given(count=st.integers(1, 12), size=st.integers(1, 5), seed=st.integers(0, 99))
def test_epoch_shows_every_prompt_once(count: int, size: int, seed: int) -> None:
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
def test_resumed_schedule_has_same_prompts(
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


def test_silent_prompt_is_revisited_with_falling_probability() -> None:
    """One of ten prompts never has a signal. Expected: 1/2, then 1/4, 1/8, and never below 1/16."""
    hits, tries = Counter[int](), Counter[int]()
    for seed in range(60):
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


def test_prompt_with_signal_has_every_turn() -> None:
    turns = PromptSchedule(prompts(4), 4, seed=0, keep_prob=0.0)
    drawn(turns, range(1, 2), frozenset("0123"))
    assert turns.state()["zero_signal_streak"] == {"0": 1, "1": 1, "2": 1, "3": 1}
    turns.record_signals(2, [(prompt.prompt_id, True) for prompt in turns.prompts_for(2)])
    seen = set(turns.state()["zero_signal_streak"])
    third = [prompt.prompt_id for prompt in turns.prompts_for(3)]
    assert set("0123") - seen <= set(third)


def test_skipping_prompts_keeps_dataset_weights() -> None:
    pool, shares = [*of("a", 5), *of("b", 5)], {"a": 2.0, "b": 1.0}
    turns = PromptSchedule(pool, 6, seed=0, weights=shares, keep_prob=0.0)
    found = drawn(turns, range(1, 30), frozenset(f"a/{i}" for i in range(4)))
    assert all(Counter(name[0] for name in names) == {"a": 4, "b": 2} for names in found)
    late = Counter(name for names in found[10:] for name in names)
    assert late["a/4"] > 5 * max(late[f"a/{i}"] for i in range(4))


def test_schedule_forgets_recorded_iterations() -> None:
    turns = PromptSchedule(prompts(10), 2, seed=0)
    drawn(turns, range(1, 6), frozenset("0123456789"))
    assert turns.state() == {"num_started": 5, "cursors": {"": 10}, "pending": {}, "zero_signal_streak": {}}


def test_recorded_iteration_has_no_prompts() -> None:
    turns = PromptSchedule(prompts(10), 2, seed=0)
    drawn(turns, range(1, 4))
    with pytest.raises(CheckpointError, match=r"iteration 2 was already recorded: .* started 3"):
        turns.prompts_for(2)


NO_CORRECTION = UpdateConfig(rollout_correction=RolloutCorrectionConfig(mode="off"))
DISTIL_KL = KlConfig(coefficient=1.0, apply_to="reward")


@pytest.mark.parametrize(
    ("algorithm", "sampling", "changes", "problem"),
    [
        ("grpo", {"zero_signal_keep_prob": 0.5}, {"group_size": 1}, "zero_signal_keep_prob < 1 needs group_size > 1"),
        ("ppo", {"zero_signal_keep_prob": 0.5}, {}, "ppo does not use zero_signal_keep_prob: with a critic, groups of"),
        ("distil", {"zero_signal_keep_prob": 0.5}, {"kl": DISTIL_KL}, "distil does not use zero_signal_keep_prob"),
        ("ppo", {"dynamic_sampling_rounds": 1}, {}, "ppo does not use dynamic_sampling_rounds"),
        ("dapo", {"dynamic_sampling_rounds": 1}, {"group_size": 1}, "group_size > 1"),
        ("grpo", {"staleness": 1}, {"update": NO_CORRECTION}, r"needs update\.rollout_correction"),
        ("grpo", {"staleness": 1, "dynamic_sampling_rounds": 1}, {}, "dynamic_sampling_rounds"),
    ],
)
def test_sampling_without_effect_is_refused(
    algorithm: str, sampling: dict[str, Any], changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        sampled = SamplingConfig(max_new_tokens=8, **sampling)
        resolve_algorithm(strategies.rl_config(algorithm, sampling=sampled, **changes))


@given(weights=st.lists(st.integers(1, 9), min_size=2, max_size=4), first=st.integers(1, 50))
def test_dataset_weights_hold_for_any_stretch(weights: list[int], first: int) -> None:
    shares = {f"d{place}": float(weight) for place, weight in enumerate(weights)}
    pool = [prompt for name in shares for prompt in of(name, 5)]
    turns = PromptSchedule(pool, 40, seed=0, weights=shares)
    found = [prompt.dataset for prompt in turns.prompts_for(first)]
    for name, share in shares.items():
        assert abs(found.count(name) - 40 * share / sum(weights)) <= 2.0


def test_dataset_in_mix_shows_every_prompt_once_an_epoch() -> None:
    pool, shares = [*of("a", 6), *of("b", 3)], {"a": 3.0, "b": 1.0}
    straight = [
        prompt for prompt in PromptSchedule(pool, 24, seed=1, weights=shares).prompts_for(1) if prompt.dataset == "a"
    ]
    first, second = [[prompt.prompt_id for prompt in straight][place : place + 6] for place in (0, 6)]
    assert sorted(first) == sorted(second) == [f"a/{i}" for i in range(6)]
    assert first != second


def test_replacements_keep_dataset_weights() -> None:
    found = [prompt.dataset for prompt in interleave([*of("a", 5), *of("b", 1)], {"a": 2.0, "b": 1.0})]
    assert found == ["a", "b", "a", "a", "a", "a"]


Group = tuple[int, bool]  # (number of the draw, whether it carries a signal)


class Source:
    """Numbers the groups that are asked for; ``signals`` says which of them carry one."""

    def __init__(self, signals: Sequence[bool]) -> None:
        self.signals = list(signals)
        self.asked: list[tuple[int, int]] = []
        self.given = 0

    def draw(self, number: int, count: int) -> list[Group]:
        self.asked.append((number, count))
        groups = [(self.given + i, signal) for i, signal in enumerate(self.signals[self.given : self.given + count])]
        self.given += len(groups)
        return groups


def replaced(first: Sequence[bool], later: Sequence[bool], *, max_rounds: int) -> tuple[SampledGroups[Group], Source]:
    """Groups of the batch have numbers from 100, later ones from 0."""
    source = Source(later)
    groups = [(100 + place, signal) for place, signal in enumerate(first)]
    return replace_groups(groups, source.draw, lambda group: group[1], max_rounds=max_rounds), source


def test_silent_groups_are_replaced_in_place() -> None:
    # Places 0 and 2 are empty; the first round brings an empty and a good group, the second a good one for place 0.
    drawn, source = replaced([False, True, False], [False, True, True], max_rounds=5)
    assert drawn.groups == ((2, True), (101, True), (1, True))
    assert drawn.replaced == ((100, False), (102, False), (0, False))
    assert source.asked == [(1, 2), (2, 1)]


@given(
    first=st.lists(st.booleans(), min_size=1, max_size=6),
    later=st.lists(st.booleans(), max_size=12),
    max_rounds=st.integers(0, 4),
)
def test_every_group_is_trained_or_replaced(first: list[bool], later: list[bool], max_rounds: int) -> None:
    drawn, source = replaced(first, later, max_rounds=max_rounds)
    numbers = sorted(number for number, _ in (*drawn.groups, *drawn.replaced))
    assert numbers == sorted([*range(source.given), *range(100, 100 + len(first))])
    assert len(drawn.groups) == len(first)
    assert not any(signal for _, signal in drawn.replaced)
    assert all(group == (100 + place, True) for place, group in enumerate(drawn.groups) if first[place])
    assert [number for number, _ in source.asked] == list(range(1, len(source.asked) + 1))
    assert len(source.asked) <= max_rounds


@given(count=st.integers(1, 12), taken=st.integers(0, 12), seed=st.integers(0, 99), iteration=st.integers(1, 50))
def test_unused_prompts(count: int, taken: int, seed: int, iteration: int) -> None:
    used = {str(i) for i in range(taken)}
    fresh = unused_prompts(prompts(count), used, seed=seed, iteration=iteration)
    assert sorted(int(prompt.prompt_id) for prompt in fresh) == list(range(min(taken, count), count))
    assert fresh == unused_prompts(prompts(count), used, seed=seed, iteration=iteration)


NUM_PROMPTS, GROUP_SIZE = 10, 3


class NumberedEngine:
    """Completions that say which prompt, seed and place they are of; remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[str], int]] = []

    def sample(
        self, prompts: list[Prompt], params: SamplingParams, *, seed: int
    ) -> list[list[Rollout | FailedRollout]]:
        self.asked.append(([p.prompt_id for p in prompts], seed))
        return [[self.rollout(p, place, seed) for place in range(params.num_samples)] for p in prompts]

    def rollout(self, prompt: Prompt, place: int, seed: int) -> Rollout:
        made = strategies.scored_rollout(0.0, completion_ids=(5, 2)).rollout
        return dataclasses.replace(made, prompt=prompt, text=f"{seed}/{place}")


def make_run(*, max_replacements: int, always_right: set[str]) -> Any:
    """A run of four prompts per iteration; groups of ``always_right`` prompts have no signal."""

    def reward(rollouts: list[Rollout]) -> list[Score]:
        values = [1.0 if r.prompt.prompt_id in always_right else float(r.text.endswith("/0")) for r in rollouts]
        return [Score(value=value, terms={"math": value}) for value in values]

    rl = strategies.rl_config(
        "dapo",
        group_size=GROUP_SIZE,
        prompts_per_iteration=4,
        sampling=SamplingConfig(max_new_tokens=8, dynamic_sampling_rounds=max_replacements),
    )
    pool = prompts(NUM_PROMPTS)
    components = SimpleNamespace(
        config=rl,
        seed=7,
        prompts=pool,
        mixture_weights={},
        sampler=NumberedEngine(),
        reward=reward,
        tokenizer=SimpleNamespace(eos_ids=(2,)),
    )
    return SimpleNamespace(
        components=components,
        recorder=SimpleNamespace(log=print),
        prompt_schedule=PromptSchedule(pool, 4, seed=7),
        audit=SimpleNamespace(check_seed=lambda seed, *purpose: None, allow_missing=lambda count: None),
    )


def ids(groups: Any) -> list[str]:
    """The prompt of each group, and that a group is whole and of one prompt."""
    assert all(len({item.rollout.prompt.prompt_id for item in group}) == 1 for group in groups)
    assert all(len(group) == GROUP_SIZE for group in groups)
    return [group[0].rollout.prompt.prompt_id for group in groups]


def test_collect_groups_is_deterministic() -> None:
    hard = {str(number) for number in range(5)}
    runs = [make_run(max_replacements=3, always_right=hard) for _ in range(2)]
    drawn = [collect_groups(run, 2, {}) for run in runs]
    assert drawn[0] == drawn[1]
    assert runs[0].components.sampler.asked == runs[1].components.sampler.asked
    collect_groups(runs[0], 3, {})
    seeds = [seed for _, seed in runs[0].components.sampler.asked]
    assert len(set(seeds)) == len(seeds)


def test_replacements_keep_first_draw() -> None:
    off, on = (make_run(max_replacements=n, always_right={"0", "1", "2", "3", "4", "5"}) for n in (0, 3))
    for iteration in (1, 2, 3):
        on.components.sampler.asked.clear()
        off.components.sampler.asked.clear()
        collect_groups(off, iteration, {})
        collect_groups(on, iteration, {})
        assert on.components.sampler.asked[0] == off.components.sampler.asked[0]
        assert len(off.components.sampler.asked) == 1


def test_draw_ends_if_every_prompt_is_silent() -> None:
    run = make_run(max_replacements=50, always_right=set(map(str, range(NUM_PROMPTS))))
    seconds: dict[str, float] = {}
    drawn = collect_groups(run, 1, seconds)
    asked = [name for names, _ in run.components.sampler.asked for name in names]
    assert sorted(asked) == sorted(map(str, range(NUM_PROMPTS)))  # each prompt once
    assert sorted(ids(drawn.groups) + ids(drawn.replaced)) == sorted(asked)
    assert seconds.keys() == {"rollout", "score"}


@pytest.mark.parametrize("staleness", [0, 1])
def test_unscored_rollouts_are_recorded_before_stop(staleness: int) -> None:
    run = make_run(max_replacements=0, always_right=set())
    run.components.reward = lambda rollouts: [Score(value=None, terms={}, error="timeout")] * len(rollouts)
    said: list[Any] = []
    run.recorder = SimpleNamespace(
        rollouts=lambda iteration, drawn: said.append((iteration, drawn)), flush=lambda: said.append("flush")
    )
    if staleness:
        run.components.config = dataclasses.replace(
            run.components.config, sampling=SamplingConfig(max_new_tokens=8, staleness=1), num_iterations=9
        )
        run.prefetcher = SimpleNamespace(get=lambda rollouts_of, iteration, **bounds: rollouts_of(iteration))
    with pytest.raises(RewardError, match="12 of 12 rollouts could not be scored"):
        collect_groups(run, 3, {})
    (iteration, drawn), flushed = said
    assert (iteration, flushed) == (3, "flush")
    assert {item.score.error for group in drawn.groups for item in group} == {"timeout"}
    assert len(ids(drawn.groups)) == 4


def test_replacement_metrics() -> None:
    first = [p.prompt_id for p in make_run(max_replacements=0, always_right=set()).prompt_schedule.prompts_for(1)]
    drawn = collect_groups(make_run(max_replacements=2, always_right={first[0]}), 1, {})
    metrics = replacement_metrics(drawn, truncated="score")
    # 4 groups with one right of three, and one group of three right: (4 * 1 + 3) / 15.
    assert metrics == {
        "groups/replaced": 1.0,
        "rollouts/discarded": 3.0,
        "reward/mean_before_filtering": pytest.approx(7 / 15),
    }
    check_names(metrics)


def test_group_signal_uses_trained_rewards() -> None:
    cut = [strategies.scored_rollout(1.0, finish_reason="length"), strategies.scored_rollout(0.0)]
    assert group_has_signal(cut, truncated="score")
    assert not group_has_signal(cut, truncated="zero")
    assert not group_has_signal(cut, truncated="mask")
    assert not group_has_signal([strategies.scored_rollout(None), strategies.scored_rollout(0.0)], truncated="score")
    assert not group_has_signal([], truncated="score")
