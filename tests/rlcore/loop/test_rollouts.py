"""The groups of an iteration: what the engine is asked for, and what dynamic sampling replaces."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from rlcore.algorithms.resolve import resolve_algorithm
from rlcore.config import SamplingConfig
from rlcore.errors import ConfigError, RewardError
from rlcore.loop.prompt_schedule import PromptSchedule
from rlcore.loop.rollouts import collect_groups, group_has_signal, replacement_metrics
from rlcore.metrics import check_names
from rlcore.sampling.base import SamplingParams
from rlcore.types import FailedRollout, Message, Prompt, Rollout, Score
from tests import strategies

NUM_PROMPTS, GROUP_SIZE = 10, 3


def prompt(number: int) -> Prompt:
    message = Message(role="user", content=f"question {number}")
    return Prompt(prompt_id=str(number), messages=(message,), token_ids=(number,), reference="", task="t")


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
        return Rollout(
            prompt=prompt,
            completion_ids=(5, 2),
            sampler_logprobs=(-0.5, -0.1),
            loss_mask=(True, True),
            policy_version=0,
            finish_reason="stop",
            text=f"{seed}/{place}",
        )


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
    prompts = [prompt(number) for number in range(NUM_PROMPTS)]
    components = SimpleNamespace(
        config=rl,
        seed=7,
        prompts=prompts,
        mixture_weights={},
        sampler=NumberedEngine(),
        reward=reward,
        tokenizer=SimpleNamespace(eos_ids=(2,)),
    )
    return SimpleNamespace(
        components=components,
        recorder=SimpleNamespace(log=print),
        prompt_schedule=PromptSchedule(prompts, 4, seed=7),
        audit=SimpleNamespace(check_seed=lambda seed, *purpose: None, allow_missing=lambda count: None),
    )


def ids(groups: Any) -> list[str]:
    """The prompt of each group, and that a group is whole and of one prompt."""
    assert all(len({item.rollout.prompt.prompt_id for item in group}) == 1 for group in groups)
    assert all(len(group) == GROUP_SIZE for group in groups)
    return [group[0].rollout.prompt.prompt_id for group in groups]


def test_groups_without_signal_are_replaced_whole_by_prompts_that_the_iteration_has_not_used() -> None:
    first = [p.prompt_id for p in make_run(max_replacements=0, always_right=set()).prompt_schedule.prompts_for(1)]
    run = make_run(max_replacements=4, always_right={first[1], first[3]})
    drawn = collect_groups(run, 1, {})
    assert ids(drawn.replaced) == [first[1], first[3]]
    assert [ids(drawn.groups)[place] for place in (0, 2)] == [first[0], first[2]]
    assert not set(ids(drawn.groups)) & {first[1], first[3]}
    assert len(set(ids(drawn.groups))) == 4
    assert all(group_has_signal(group, truncated="score") for group in drawn.groups)


def test_the_same_iteration_draws_the_same_again_and_another_round_or_iteration_draws_anew() -> None:
    hard = {str(number) for number in range(5)}
    runs = [make_run(max_replacements=3, always_right=hard) for _ in range(2)]
    drawn = [collect_groups(run, 2, {}) for run in runs]
    assert drawn[0] == drawn[1]
    assert runs[0].components.sampler.asked == runs[1].components.sampler.asked
    collect_groups(runs[0], 3, {})
    seeds = [seed for _, seed in runs[0].components.sampler.asked]
    assert len(set(seeds)) == len(seeds)


def test_replacements_leave_the_first_draw_of_every_iteration_as_it_is() -> None:
    off, on = (make_run(max_replacements=n, always_right={"0", "1", "2", "3", "4", "5"}) for n in (0, 3))
    for iteration in (1, 2, 3):
        on.components.sampler.asked.clear()
        off.components.sampler.asked.clear()
        collect_groups(off, iteration, {})
        collect_groups(on, iteration, {})
        assert on.components.sampler.asked[0] == off.components.sampler.asked[0]
        assert len(off.components.sampler.asked) == 1


def test_off_by_default_nothing_is_replaced_and_no_order_of_replacements_is_drawn() -> None:
    assert SamplingConfig(max_new_tokens=1).dynamic_sampling_rounds == 0
    drawn = collect_groups(make_run(max_replacements=0, always_right=set(map(str, range(10)))), 1, {})
    assert drawn.replaced == ()
    assert len(drawn.groups) == 4


def test_where_every_prompt_is_without_signal_the_draw_ends_when_prompts_run_out() -> None:
    run = make_run(max_replacements=50, always_right=set(map(str, range(NUM_PROMPTS))))
    seconds: dict[str, float] = {}
    drawn = collect_groups(run, 1, seconds)
    asked = [name for names, _ in run.components.sampler.asked for name in names]
    assert sorted(asked) == sorted(map(str, range(NUM_PROMPTS)))  # each prompt once
    assert sorted(ids(drawn.groups) + ids(drawn.replaced)) == sorted(asked)
    assert seconds.keys() == {"rollout", "score"}


@pytest.mark.parametrize("staleness", [0, 1])
def test_what_a_failing_grader_could_not_score_is_recorded_before_the_run_stops(staleness: int) -> None:
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


def test_what_was_replaced_is_counted() -> None:
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


def test_the_signal_of_a_group_is_that_of_the_rewards_that_will_be_trained_on() -> None:
    cut = [strategies.scored_rollout(1.0, finish_reason="length"), strategies.scored_rollout(0.0)]
    assert group_has_signal(cut, truncated="score")
    assert not group_has_signal(cut, truncated="zero")
    assert not group_has_signal(cut, truncated="mask")
    assert not group_has_signal([strategies.scored_rollout(None), strategies.scored_rollout(0.0)], truncated="score")
    assert not group_has_signal([], truncated="score")


def test_dynamic_sampling_is_refused_where_it_means_nothing() -> None:
    sampling = SamplingConfig(max_new_tokens=8, dynamic_sampling_rounds=1)
    with pytest.raises(ConfigError, match="ppo does not use dynamic_sampling_rounds"):
        resolve_algorithm(strategies.rl_config("ppo", sampling=sampling))
    with pytest.raises(ConfigError, match="group_size > 1"):
        strategies.rl_config("dapo", sampling=sampling, group_size=1)
