"""The likeliest causes of health findings: figures made by hand for each cause, and their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rlcore.checks.causes import CAUSES, explained
from rlcore.checks.health import HealthFinding, check_health
from rlcore.config import HealthConfig, RewardTerm, SamplingConfig
from tests import strategies

Rows = Sequence[Mapping[str, float]]
SAMPLING = SamplingConfig(max_new_tokens=64)
ZERO_SIGNAL = {"groups/zero_signal": 1.0, "reward/std": 0.0}
RIGHT, WRONG = ZERO_SIGNAL | {"reward/mean": 1.0}, ZERO_SIGNAL | {"reward/mean": 0.0}


def rows(*figures: Mapping[str, float]) -> list[dict[str, float]]:
    return [{"iteration": number, **each} for number, each in enumerate(figures, start=1)]


def findings(history: Rows, **settings: Any) -> dict[str, HealthFinding]:
    """Every finding after the last row with its cause, by rule."""
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


def test_a_bonus_that_every_wrong_answer_gets_is_no_fault_of_the_reward() -> None:
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


def test_only_figures_since_the_limit_was_exceeded_are_looked_at() -> None:
    cut, whole = {"completion/truncated": 1.0, "reward/std": 0.4, "reward/mean": 0.5}, {"completion/truncated": 0.0}
    assert "no answer is right" in findings(rows(cut, WRONG | whole))["zero_signal"].cause


def test_a_finding_without_a_known_cause_has_the_fix_of_its_rule() -> None:
    found = findings(rows({"value/explained_variance": -3.0}))["critic"]
    assert (found.cause, found.fix.partition(",")[0]) == ("", "critic.warmup_iterations")
    assert str(found).startswith("critic: ")
