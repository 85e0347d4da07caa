"""Health rules, the causes that figures show, and settings that contradict the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from rlcore.checks.causes import CAUSES, explained
from rlcore.checks.health import RULES, HealthFinding, HealthMonitor, HealthReport
from rlcore.checks.settings import algorithm_errors, check_context, require_disjoint
from rlcore.config import LIMITS, HealthConfig, LimitConfig, RewardTerm, SamplingConfig
from rlcore.errors import ConfigError
from rlcore.evaluation.intervals import accuracy
from rlcore.metrics import METRICS, render
from rlcore.strict_config import build
from rlcore.types import Message, Prompt
from tests import strategies


def check_health(rows: Sequence[Mapping[str, float]], config: HealthConfig) -> HealthReport:
    return HealthMonitor(config).update(rows)


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
        history(reward__mean=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6], eval__accuracy=[None, 0.8, None, 0.5, None, 0.5]),
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
def test_between_its_limits_a_rule_warns_and_every_checkpoint_stays_healthy(
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


def test_a_run_that_was_never_within_a_limit_has_no_healthy_checkpoint() -> None:
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
def test_a_longer_history_never_makes_an_unhealthy_checkpoint_healthy(rows: list[dict[str, float]]) -> None:
    numbered = [{"iteration": place + 1, **row} for place, row in enumerate(rows)]
    for length in range(1, len(rows) + 1):
        verdict = check_health(numbered[:length], HealthConfig())
        if verdict.stop is not None:
            assert verdict.last_healthy < verdict.stop.since


Rows = Sequence[Mapping[str, float]]

SAMPLING = SamplingConfig(max_new_tokens=64)

ZERO_SIGNAL = {"groups/zero_signal": 1.0, "reward/std": 0.0}

RIGHT, WRONG = ZERO_SIGNAL | {"reward/mean": 1.0}, ZERO_SIGNAL | {"reward/mean": 0.0}


def rows(*figures: Mapping[str, float]) -> list[dict[str, float]]:
    return [{"iteration": number, **each} for number, each in enumerate(figures, start=1)]


def findings(history: Rows, **settings: Any) -> dict[str, HealthFinding]:
    rl = strategies.rl_config("grpo", **{"sampling": SAMPLING, "learning_rate": 1.0} | settings)
    found = check_health(history, HealthConfig()).findings
    return {each.rule: explained(each, history, rl) for each in found}


COLLAPSE = rows(
    {"entropy/sampled": 5.0, "entropy": 5.0},
    {"entropy/sampled": 0.5, "entropy": 0.5},
    {"entropy/sampled": 0.0, "entropy": 0.0, **RIGHT},
)

# Of each cause, the rule that it explains, figures that show it, and how its sentence begins.
SHOWN: Mapping[str, tuple[str, Rows, str]] = {
    "entropy fell": (
        "zero_signal",
        COLLAPSE,
        "the update was too large (learning_rate = 1): entropy fell from 5 to 0.5",
    ),
    "entropy rose": (
        "zero_signal",
        rows({"entropy/sampled": 0.5}, {"entropy/sampled": 9.0}, {"entropy/sampled": 9.0, **WRONG}),
        "the update was too large (learning_rate = 1): entropy rose from 0.5 to 9",
    ),
    "kl/ref": (
        "kl",
        rows({"kl/ref": 0.0}, {"kl/ref": 0.1}, {"kl/ref": 3.0}),
        "the update was too large (learning_rate = 1): kl/ref rose from 0.1 to 3 nats per token after iteration 2",
    ),
    "kl/old": (
        "clip",
        rows({"clip/fraction": 0.9, "kl/old": 0.7, "gradient_norm": 1.0}),
        "the update was too large (learning_rate = 1): log-probabilities moved by kl/old = 0.7 nats per token within "
        "iteration 1",
    ),
    "gradient": (
        "entropy",
        rows({"gradient_norm": 2.0}, {"gradient_norm": 4.0}, {"gradient_norm": 300.0}, {"entropy": 0.0}),
        "the gradient norm rose from about 3 to 300 at iteration 3",
    ),
    "cut": (
        "zero_signal",
        rows(WRONG | {"completion/truncated": 1.0}),
        "every answer was cut at sampling.max_new_tokens = 64",
    ),
    "most cut": (
        "zero_signal",
        rows(WRONG | {"completion/truncated": 0.97}),
        "97% of the answers were cut at sampling.max_new_tokens = 64",
    ),
    "partly cut": (
        "zero_signal",
        rows(WRONG | {"completion/truncated": 0.87}),
        "87% of the answers were cut at sampling.max_new_tokens = 64, and rewards are constant at 0",
    ),
    "cut before a call": (
        "tools",
        rows({"episode/parsed": 0.0, "completion/truncated": 1.0}),
        "every answer was cut at sampling.max_new_tokens = 64",
    ),
    "format": (
        "zero_signal",
        rows(WRONG | {"reward/term_zero/format": 1.0, "reward/term_zero/math": 1.0}),
        "no answer has the form that the reward 'format' requires",
    ),
    "solved": ("zero_signal", rows(RIGHT), "rewards are constant at 1: the prompts are solved"),
    "certain": ("entropy", rows(RIGHT | {"entropy": 0.0}), "rewards are constant at 1: the prompts are solved"),
    "never solved": ("zero_signal", rows(WRONG), "rewards are constant at 0: no answer is right"),
    "constant": (
        "zero_signal",
        rows(WRONG | {"reward/mean": 0.3}),
        "rewards are constant at 0.3: they do not depend on the answer",
    ),
    "all or nothing": (
        "zero_signal",
        rows({"groups/zero_signal": 1.0, "reward/mean": 0.4, "reward/std": 0.5}),
        "answers to one prompt get equal rewards, other prompts other ones (mean 0.4)",
    ),
}


@pytest.mark.parametrize("name", SHOWN)
def test_a_finding_names_the_cause_that_the_figures_show(name: str) -> None:
    rule, history, sentence = SHOWN[name]
    found = findings(history)[rule]
    assert found.cause.startswith(sentence)
    assert str(found).startswith(f"{found.cause} ({rule}: ")
    assert found.fix in {cause.fix for cause in CAUSES if rule in cause.rules}


def test_every_cause_is_shown_by_some_figures() -> None:
    assert {findings(history)[rule].fix for rule, history, _ in SHOWN.values()} == {cause.fix for cause in CAUSES}


def test_a_collapse_is_named_before_cut_answers_and_these_before_a_missing_form_and_that_before_the_reward() -> None:
    figures = {"completion/truncated": 1.0, "reward/term_zero/format": 1.0, **WRONG}
    named = []
    for gone in ("", "entropy/sampled", "completion/truncated", "reward/term_zero/format"):
        figures.pop(gone, None)
        history = [{**row, **figures} for row in COLLAPSE]
        if gone:
            history = [{name: value for name, value in row.items() if name != "entropy/sampled"} for row in history]
        named.append(findings(history)["zero_signal"].cause.partition(" (")[0].partition(":")[0])
    assert named == [
        "the update was too large",
        "every answer was cut at sampling.max_new_tokens = 64",
        "no answer has the form that the reward 'format' requires",
        "rewards are constant at 0",
    ]


def test_answers_that_are_cut_and_right_are_solved_prompts() -> None:
    assert findings(rows(RIGHT | {"completion/truncated": 1.0}))["zero_signal"].cause.endswith("the prompts are solved")


def test_a_cut_that_earned_rewards_before_does_not_explain_their_absence() -> None:
    cut = {"completion/truncated": 1.0}
    assert (
        "no answer is right"
        in findings(rows(cut | {"reward/mean": 0.2, "reward/std": 0.4}, WRONG | cut))["zero_signal"].cause
    )
    assert "every answer was cut" in findings(rows(cut | {"reward/mean": 0.0}, WRONG | cut))["zero_signal"].cause


def test_a_bonus_that_every_wrong_answer_gets_is_no_cause() -> None:
    terms = (RewardTerm(kind="math"), RewardTerm(kind="my_rewards:brief", weight=0.2))
    bonus = WRONG | {"reward/mean": 0.2, "reward/term_zero/math": 1.0, "reward/term_zero/brief": 0.0}
    assert "constant at 0.2: no answer is right" in findings(rows(bonus), rewards=terms)["zero_signal"].cause


def test_the_largest_reward_is_the_sum_of_the_weights() -> None:
    terms = (RewardTerm(kind="math", weight=2.0), RewardTerm(kind="length", weight=-1.0))
    assert "do not depend" in findings(rows(RIGHT), rewards=terms)["zero_signal"].cause
    assert "solved" in findings(rows(RIGHT | {"reward/mean": 2.0}), rewards=terms)["zero_signal"].cause


@pytest.mark.parametrize(
    "entropies",
    [
        [5.4, 5.0, 4.6, 3.9, 2.7, 1.5, 0.8, 0.2, 0.0],
        [5.3, 4.1, 1.6, 1.0, 0.5, 0.1, 0.0],  # the sharpest sound run that was measured
        [0.8, 0.3, 0.7, 0.2, 0.6, 0.1],  # few prompts, whose entropies differ
        [0.4, 0.15],
        [0.4, 0.39, 0.35, 0.3, 0.25, 0.2],
    ],
)
def test_entropy_that_falls_slowly_or_varies_is_no_collapse(entropies: list[float]) -> None:
    history = rows(*({"entropy/sampled": value, **RIGHT} for value in entropies))
    assert "solved" in findings(history)["zero_signal"].cause


def test_little_entropy_that_is_gone_after_one_update_is_a_collapse() -> None:
    history = rows(*({"entropy/sampled": value, **RIGHT} for value in (0.4, 0.38, 0.02)))
    assert "entropy fell from 0.38 to 0.02 nats per token after iteration 2" in findings(history)["zero_signal"].cause


def test_only_figures_since_the_limit_was_exceeded_count() -> None:
    cut, whole = {"completion/truncated": 1.0, "reward/std": 0.4, "reward/mean": 0.5}, {"completion/truncated": 0.0}
    assert "no answer is right" in findings(rows(cut, WRONG | whole))["zero_signal"].cause


def test_a_finding_without_a_known_cause_has_the_fix_of_its_rule() -> None:
    found = findings(rows({"value/explained_variance": -3.0}))["critic"]
    assert (found.cause, found.fix.partition(",")[0]) == ("", "critic.warmup_iterations")
    assert str(found).startswith("critic: ")


def prompt(name: str, num_tokens: int) -> Prompt:
    return Prompt(
        prompt_id=name,
        messages=(Message(role="user", content=name),),
        token_ids=tuple(range(num_tokens)),
        reference="",
        task="",
    )


def test_the_longest_prompt_must_leave_room_for_a_whole_completion() -> None:
    prompts = [prompt("short", 3), prompt("long", 30), prompt("other", 4)]
    check_context(38, prompts, 8, key="stages.grpo.sampling.max_new_tokens")
    with pytest.raises(ConfigError, match=r"'long' .*38 in all, the model reads 37") as caught:
        check_context(37, prompts, 8, key="stages.grpo.sampling.max_new_tokens")
    assert "stages.grpo.sampling.max_new_tokens" in str(caught.value)


@pytest.mark.parametrize(
    ("algorithm", "group_size", "expected"),
    [
        ("grpo", 1, "group_size = 1: grpo compares answers to one prompt, so one carries no signal; take 8"),
        ("grpo", 2, ""),
        ("ppo", 1, ""),  # its critic is the baseline
        ("grpoo", 8, "algorithm: unknown algorithm 'grpoo'; choose one of "),
    ],
)
def test_a_group_of_one_is_refused_where_the_group_is_the_baseline(
    algorithm: str, group_size: int, expected: str
) -> None:
    found = list(algorithm_errors(strategies.rl_config(algorithm, group_size=group_size)))
    assert len(found) == bool(expected) and "".join(found).startswith(expected)


@pytest.mark.parametrize(
    ("held_out", "is_refused"),
    [
        (prompt("What  IS 3 + 4?", 9), True),  # the same words
        (prompt("other words", 5), True),  # the same tokens
        (prompt("What is 3 + 5?", 9), False),
    ],
)
def test_held_out_prompts_are_not_trained_on(held_out: Prompt, is_refused: bool) -> None:
    trained = [prompt("What is 3 + 4?", 5), prompt("another", 6)]
    if not is_refused:
        require_disjoint(trained, [held_out])
        return
    with pytest.raises(
        ConfigError, match=r"1 of 2 training prompts are held-out prompts too, for example 'What is 3"
    ) as caught:
        require_disjoint(trained, [held_out])
    assert "remove them from prompts or from held_out.prompts" in str(caught.value)
