"""The health rules: hand-made histories for every rule, and what holds of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from rlcore.checks.health import RULES, check_health
from rlcore.config import LIMITS, HealthConfig, LimitConfig
from rlcore.errors import ConfigError
from rlcore.evaluation.intervals import accuracy
from rlcore.metrics import METRICS, render
from rlcore.strict_config import build

Curves = Mapping[str, Sequence[float | None]]


def history(**curves: Sequence[float | None]) -> list[dict[str, float]]:
    """One row per iteration, from 1; ``kl__ref`` stands for ``kl/ref``, None for an iteration without the metric."""
    length = max(map(len, curves.values()))
    return [
        {"iteration": place + 1}
        | {
            name.replace("__", "/"): values[place]
            for name, values in curves.items()
            if place < len(values) and values[place] is not None
        }
        for place in range(length)
    ]


# Each ends at the stop of its rule and not one reading earlier; `since` and `sound` follow from the rule's lag.
STOPS: Mapping[str, tuple[list[dict[str, float]], int, int]] = {
    # Above 2 nats from iteration 3 on, patience 3: rollouts of iteration 3 are of the weights after iteration 2, so the
    # newest weights that were seen within the bound are those after iteration 1.
    "kl": (history(kl__ref=[0.1, 0.2, 2.1, 5.0, 2.1]), 3, 1),
    "clip": (history(clip__fraction=[0.1, 0.2, 0.3, *[0.9] * 5]), 4, 2),
    "entropy": (history(entropy=[0.5, 0.4, *[0.0005] * 5]), 3, 1),
    "zero_signal": (history(groups__zero_signal=[0.5, 0.5, 0.5, 0.5, *[1.0] * 10]), 5, 3),
    # The first three have 10 tokens on average: 101 are 10.1 times as many, 0.9 are 11.1 times fewer.
    "length": (history(completion__length=[9.0, 10.0, 11.0, 101.0, 0.9, 101.0, 101.0, 101.0]), 4, 2),
    # Accuracy is measured after the update: those after iteration 2 are the best, and sound. Reward rises meanwhile.
    "reward_hacking": (
        history(
            reward__mean=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6],
            eval__accuracy=[None, 0.8, None, 0.5, None, 0.5],
        ),
        4,
        2,
    ),
    # Means of five: -0.5 (twice) and -0.9, -1.0 are within the bound, -5.1 / 4 = -1.275 is the first beyond it.
    "critic": (history(value__explained_variance=[0.0, -0.6, -1.5, -3.0, *[-2.0] * 9]), 4, 2),
    # One of a thousand episodes calls, then none: rollouts of iteration 3 are of the weights after iteration 2.
    "tools": (history(episode__parsed=[0.5, 0.001, *[0.0] * 5]), 3, 1),
    "mismatch": (history(mismatch__kl=[1e-4, 1e-4, 0.2, 0.2, 0.2]), 3, 1),
}


@pytest.mark.parametrize("rule", STOPS)
def test_a_rule_stops_the_run_when_its_patience_is_used_up_and_not_before(rule: str) -> None:
    rows, since, sound = STOPS[rule]
    verdict = check_health(rows, HealthConfig())
    assert verdict.stop is not None
    assert (verdict.stop.rule, verdict.stop.since, verdict.last_healthy) == (rule, since, sound)
    before = check_health(rows[:-1], HealthConfig())
    assert before.stop is None
    assert [finding.level for finding in before.findings if finding.rule == rule] == ["alarm"]


def test_every_rule_has_a_history_that_stops_it_a_limit_and_a_metric_of_the_glossary() -> None:
    assert {rule.name for rule in RULES} == set(STOPS) == set(LIMITS)
    assert all(rule.metric in METRICS for rule in RULES)
    assert all(f"| {rule.name} | `{rule.metric}` |" in render() for rule in RULES)


@pytest.mark.parametrize(
    ("rows", "rule"),
    [
        (history(kl__ref=[0.1, 0.6]), "kl"),
        (history(clip__fraction=[0.1, 0.5]), "clip"),
        (history(entropy=[0.1, 0.005]), "entropy"),
        (history(groups__zero_signal=[0.1, 0.95]), "zero_signal"),
        (history(completion__length=[10.0, 10.0, 10.0, 50.0]), "length"),
        (history(reward__mean=[0.1, 0.2], eval__accuracy=[0.8, 0.65]), "reward_hacking"),
        (history(value__explained_variance=[0.0, -0.4]), "critic"),
        (history(mismatch__kl=[0.0, 0.02]), "mismatch"),
    ],
)
def test_between_its_bounds_a_rule_warns_and_leaves_every_checkpoint_sound(
    rows: list[dict[str, float]], rule: str
) -> None:
    verdict = check_health(rows, HealthConfig())
    last = len(rows)
    assert [(finding.rule, finding.level, finding.since) for finding in verdict.findings] == [(rule, "warn", last)]
    assert verdict.last_healthy == (last if rule == "reward_hacking" else last - 1)


@pytest.mark.parametrize("rule", [name for name in STOPS if name not in ("reward_hacking", "length")])
def test_what_is_no_number_is_within_no_bound(rule: str) -> None:
    (metric,) = {each.metric for each in RULES if each.name == rule}
    rows = [{"iteration": place + 1, metric: float("nan")} for place in range(20)]
    verdict = check_health(rows, HealthConfig())
    assert verdict.stop is not None
    assert (verdict.stop.rule, verdict.stop.since, verdict.last_healthy) == (rule, 1, 0)


def test_a_reading_within_the_bound_ends_the_row() -> None:
    rows = history(kl__ref=[3.0, 3.0, 0.1, 3.0, 3.0])
    verdict = check_health(rows, HealthConfig())
    assert [(finding.level, finding.since) for finding in verdict.findings] == [("alarm", 4)]
    assert verdict.last_healthy == 2  # the rollouts of iteration 3 were made by the weights after iteration 2


def test_stale_rollouts_speak_of_older_weights() -> None:
    rows = history(kl__ref=[0.1, 0.1, 0.1, 3.0], staleness=[0.0, 1.0, 1.0, 1.0])
    assert (
        check_health(rows, HealthConfig()).last_healthy == 1
    )  # those of iteration 3 were sampled by the weights after iteration 1


def test_a_run_that_was_never_within_a_bound_has_no_sound_checkpoint() -> None:
    verdict = check_health(history(kl__ref=[3.0, 3.0, 3.0]), HealthConfig())
    assert (verdict.stop is not None, verdict.last_healthy) == (True, 0)


def test_accuracy_that_falls_with_the_reward_is_not_gaming() -> None:
    rows = history(reward__mean=[0.5, 0.4, 0.3], eval__accuracy=[0.9, 0.5, 0.1])
    assert check_health(rows, HealthConfig()).findings == ()


def evaluations(accuracies: list[float], problems: int) -> list[dict[str, float]]:
    """A history of evaluations with their intervals, while the reward rises."""
    intervals = [accuracy([place < round(each * problems) for place in range(problems)]) for each in accuracies]
    return [
        {
            "iteration": number,
            "reward/mean": 0.01 * number,
            "eval/accuracy": one.mean,
            "eval/accuracy_low": one.low,
            "eval/accuracy_high": one.high,
        }
        for number, one in enumerate(intervals, start=1)
    ]


@pytest.mark.parametrize("problems", [100, 300])
def test_a_lucky_evaluation_followed_by_others_is_not_gaming(problems: int) -> None:
    """A policy that neither gains nor loses, evaluated twenty times: the best lies a tenth above the last."""
    generator = torch.Generator().manual_seed(0)
    shares = torch.binomial(torch.full((40, 20), float(problems)), torch.tensor(0.6), generator=generator) / problems
    assert problems == 300 or float((shares.amax(1) - shares[:, -1]).mean()) > 0.08
    for course in shares.tolist():
        rows = evaluations(course, problems)
        assert not any(check_health(rows[:end], HealthConfig()).findings for end in range(1, 21))


def test_accuracy_that_falls_beyond_chance_is_gaming() -> None:
    findings = check_health(evaluations([0.8, 0.4], 100), HealthConfig()).findings
    assert [(finding.rule, finding.level) for finding in findings] == [("reward_hacking", "alarm")]
    assert check_health(evaluations([0.8, 0.6], 100), HealthConfig()).findings == ()
    assert check_health(evaluations([0.8, 0.66], 1000), HealthConfig()).findings[0].level == "warn"


def test_groups_without_signal_are_not_judged_where_there_is_a_critic() -> None:
    rows = history(groups__zero_signal=[1.0] * 20, value__explained_variance=[0.1] * 20)
    assert check_health(rows, HealthConfig()).findings == ()


def test_two_rules_go_back_to_where_both_were_within_their_bounds() -> None:
    rows = history(kl__ref=[0.1, 0.1, 0.1, 3.0, 3.0, 3.0], mismatch__kl=[0.0, 0.2, 0.2, 0.0, 0.2, 0.2])
    assert check_health(rows, HealthConfig()).last_healthy == 2  # kl was within in iteration 3, mismatch in iteration 4


def test_rules_that_are_off_find_nothing_and_bounds_can_be_set() -> None:
    rows = history(kl__ref=[9.0] * 9)
    assert check_health(rows, HealthConfig(action="off")).findings == ()
    strict = HealthConfig(kl=LimitConfig(warn=0.01, stop=0.05, patience=1))
    verdict = check_health(history(kl__ref=[0.02, 0.06]), strict)
    assert verdict.stop is not None
    assert check_health(history(kl__ref=[0.02, 0.05]), strict).stop is None  # equal to the bound is within it


@pytest.mark.parametrize(
    "section", [{"kl": {"warn": 3.0}}, {"entropy": {"stop": 0.02}}, {"length": {"patience": 0}}, {"kll": {}}]
)
def test_bounds_that_mean_nothing_are_refused(section: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        build(HealthConfig, section)


# Random courses of every metric within the first bounds; lengths within the factor of two that is left between
# any two of them.
WITHIN = {
    "kl/ref": st.floats(0.0, 0.5), "clip/fraction": st.floats(0.0, 0.4), "entropy": st.floats(0.01, 10.0),
    "groups/zero_signal": st.floats(0.0, 0.9), "completion/length": st.floats(50.0, 100.0),
    "reward/mean": st.floats(-10.0, 10.0), "eval/accuracy": st.floats(0.5, 0.6),
    "value/explained_variance": st.floats(-0.1, 1.0), "mismatch/kl": st.floats(0.0, 0.01),
}  # fmt: skip
rows_within = st.lists(st.fixed_dictionaries({}, optional=WITHIN), min_size=1, max_size=12)


@given(rows_within)
def test_no_rule_ever_fires_within_its_bounds(rows: list[dict[str, float]]) -> None:
    numbered = [{"iteration": place + 1, **row} for place, row in enumerate(rows)]
    verdict = check_health(numbered, HealthConfig())
    assert verdict.findings == ()
    assert verdict.last_healthy <= len(rows)


anything = st.floats(-20.0, 20.0)
wild_rows = st.lists(st.fixed_dictionaries({}, optional=dict.fromkeys(WITHIN, anything)), min_size=1, max_size=14)


@given(wild_rows)
@example([{"completion/length": 4.0}, {"completion/length": 5e-324}])
@example([{"completion/length": 0.0}, {"completion/length": 5e-324}])
def test_the_verdict_of_a_longer_history_never_makes_an_unsound_checkpoint_of_a_stopped_run_sound(
    rows: list[dict[str, float]],
) -> None:
    numbered = [{"iteration": place + 1, **row} for place, row in enumerate(rows)]
    for length in range(1, len(rows) + 1):
        verdict = check_health(numbered[:length], HealthConfig())
        if verdict.stop is not None:
            assert verdict.last_healthy < verdict.stop.since
