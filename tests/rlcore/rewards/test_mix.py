"""The weighted sum keeps its terms and hides no failure; the reward model as one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcore.errors import ConfigError, RewardError
from rlcore.metrics import check_names
from rlcore.rewards.base import check_error_rate, failed_score, scored
from rlcore.rewards.mix import WeightedReward, WeightedTerm, term_statistics
from rlcore.rewards.reward_model import RewardModelOptions, RewardModelReward
from rlcore.types import Rollout, Score
from tests.rlcore.rewards.conftest import make_rollout


class Fixed:
    """A reward that gives what it was told, or raises it."""

    def __init__(self, name: str, values: Sequence[float | None] | Exception) -> None:
        self.name, self._values, self.closed = name, values, False

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        if isinstance(self._values, Exception):
            raise self._values
        return [failed_score("timeout") if value is None else scored(self.name, value) for value in self._values]

    def close(self) -> None:
        self.closed = True


def mixed(*parts: tuple[str, float, Sequence[float | None] | Exception]) -> WeightedReward:
    return WeightedReward([WeightedTerm(Fixed(name, values), weight) for name, weight, values in parts])


def test_the_total_is_the_weighted_sum_and_the_parts_are_before_weighting() -> None:
    """0.5 * 1.0 + 2.0 * 0.25 = 1.0; 0.5 * 0.0 + 2.0 * -0.5 = -1.0."""
    scores = mixed(("math", 0.5, [1.0, 0.0]), ("length", 2.0, [0.25, -0.5]))([make_rollout("")] * 2)
    assert [score.value for score in scores] == [1.0, -1.0]
    assert scores[1].terms == {"math": 0.0, "length": -0.5}


def test_where_a_part_is_unscored_the_total_is() -> None:
    first, second = mixed(("math", 1.0, [None, 1.0]), ("length", 1.0, [0.5, 0.5]))([make_rollout("")] * 2)
    assert first.value is None
    assert first.error == "math: timeout"
    assert first.terms == {"length": 0.5}
    assert second.value == 1.5


def test_a_nan_is_unscored() -> None:
    assert mixed(("rm", 1.0, [float("nan")]))([make_rollout("")])[0].error == "rm: the score is not a number"


@pytest.mark.parametrize(
    ("values", "error", "what"),
    [
        ([float("-inf")], RewardError, "rm returned an infinite score"),
        ([1.0, 1.0], RewardError, "rm returned 2 scores for 1"),
        (ConfigError("wrong"), ConfigError, "wrong"),  # an error of ours is not swallowed
    ],
)
def test_what_is_no_score_each_is_refused(values: Any, error: type[Exception], what: str) -> None:
    with pytest.raises(error, match=what):
        mixed(("rm", 1.0, values))([make_rollout("")])


def test_an_exception_in_a_grader_is_an_error_per_rollout_never_a_zero() -> None:
    scores = mixed(("math", 1.0, ZeroDivisionError("boom")), ("length", 1.0, [0.5, 0.5]))([make_rollout("")] * 2)
    assert [score.value for score in scores] == [None, None]
    assert scores[0].error == "math: ZeroDivisionError: boom"
    with pytest.raises(RewardError, match=r"2 of 2 .*2 times: math: ZeroDivisionError: boom"):
        check_error_rate(scores, max_rate=0.5)


def test_without_any_part_every_total_is_0_and_nothing_has_failed() -> None:
    scores = mixed()([make_rollout("a"), make_rollout("b")])
    assert [(score.value, dict(score.terms), score.error) for score in scores] == [(0.0, {}, "")] * 2


def test_leaving_the_block_closes_every_part() -> None:
    parts = [Fixed("a", []), Fixed("b", [])]
    with WeightedReward([WeightedTerm(part, 1.0) for part in parts]):
        assert not any(part.closed for part in parts)
    assert all(part.closed for part in parts)


@given(st.lists(st.sampled_from([None, 0.0, 1.0]), min_size=1, max_size=40), st.floats(0.0, 1.0))
def test_the_error_rate_stops_a_run_exactly_above_the_threshold(values: list[float | None], max_rate: float) -> None:
    scores = [failed_score("timeout") if value is None else scored("math", value) for value in values]
    if values.count(None) / len(values) > max_rate:
        with pytest.raises(RewardError, match="timeout"):
            check_error_rate(scores, max_rate=max_rate)
    else:
        check_error_rate(scores, max_rate=max_rate)


def gated(*parts: tuple[str, Sequence[float | None], float | None, float]) -> WeightedReward:
    return WeightedReward([WeightedTerm(Fixed(name, values), 1.0, gate, below) for name, values, gate, below in parts])


def test_below_its_gate_a_part_decides_the_total_and_at_its_gate_it_does_not() -> None:
    reward = gated(("format", [0.4, 0.5, 1.0], 0.5, -1.0), ("math", [1.0, 1.0, 1.0], None, 0.0))
    scores = reward([make_rollout("")] * 3)
    assert [score.value for score in scores] == [-1.0, 1.5, 2.0]
    assert scores[0].terms == {"format": 0.4, "math": 1.0}


def test_the_first_closed_gate_counts() -> None:
    reward = gated(("a", [1.0, 0.0, 0.0], 1.0, -1.0), ("b", [0.0, 0.0, 1.0], 1.0, -2.0))
    assert [score.value for score in reward([make_rollout("")] * 3)] == [-2.0, -1.0, -1.0]


def test_behind_a_closed_gate_an_unscored_part_does_not_matter_and_before_it_does() -> None:
    judge_behind = gated(("format", [0.0, 1.0], 1.0, -1.0), ("judge", [None, None], None, 0.0))
    assert [score.value for score in judge_behind([make_rollout("")] * 2)] == [-1.0, None]
    gate_before = gated(("judge", [None], 0.5, -2.0), ("format", [0.0], 1.0, -1.0))
    assert gate_before([make_rollout("")])[0].value is None


class Letters:
    """Pays each rollout the length of its text, and remembers which texts it was asked about."""

    def __init__(self, name: str) -> None:
        self.name, self.asked = name, list[str]()

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        self.asked += [rollout.text for rollout in rollouts]
        return [scored(self.name, float(len(rollout.text))) for rollout in rollouts]


def test_a_term_scores_the_rollouts_of_its_data_alone() -> None:
    rollouts = [_of(make_rollout(text), dataset) for text, dataset in (("ab", "sums"), ("abcd", "code"), ("a", "x"))]
    math, code = Letters("math"), Letters("code")
    parts = [WeightedTerm(math, 1.0, data=("sums",)), WeightedTerm(code, 0.5, gate=3.0, data=("code",))]
    scores = WeightedReward(parts)(rollouts)
    assert (math.asked, code.asked) == (["ab"], ["abcd"])
    assert [score.value for score in scores] == [2.0, 2.0, None]
    assert [dict(score.terms) for score in scores] == [{"math": 2.0}, {"code": 4.0}, {}]
    assert [score.skipped for score in scores[:2]] == [("code",), ("math",)]
    assert scores[2].error == "no reward applies to it"


def _of(rollout: Rollout, dataset: str) -> Rollout:
    return replace(rollout, prompt=replace(rollout.prompt, dataset=dataset))


def test_the_figures_of_two_parts() -> None:
    """math: 1, 0, 0, 1 has mean 0.5, std 0.5, half of them 0; judge: 2 and 4 have mean 3, std 1; half have no value."""
    both = [Score(value=1.0, terms={"math": 1.0, "judge": 2.0}), Score(value=1.0, terms={"math": 0.0, "judge": 4.0})]
    alone = [Score(value=None, terms={"math": value}, error="judge: slow") for value in (0.0, 1.0)]
    figures = term_statistics([*both, *alone], all_scores=[*both, *alone])
    assert figures == {
        "reward/term/math": 0.5,
        "reward/term_std/math": 0.5,
        "reward/term_zero/math": 0.5,
        "reward/term_unscored/math": 0.0,
        "reward/term/judge": 3.0,
        "reward/term_std/judge": 1.0,
        "reward/term_zero/judge": 0.0,
        "reward/term_unscored/judge": 0.5,
    }
    check_names(figures)


def test_only_the_share_without_a_value_is_of_all_scores() -> None:
    """Trained on: one 0. Sampled: that one, a 1 that was cut off, and two without a value."""
    trained = scored("math", 0.0)
    figures = term_statistics(
        [trained], all_scores=[trained, scored("math", 1.0), failed_score("slow"), failed_score("slow")]
    )
    assert figures["reward/term/math"] == 0.0
    assert figures["reward/term_zero/math"] == 1.0
    assert figures["reward/term_unscored/math"] == 0.5


def test_a_part_that_is_not_on_a_rollouts_data_has_not_failed_there() -> None:
    """Two code answers, one without a value, and two sums that the part is not on: half of what it was asked failed."""
    sums = [Score(value=1.0, terms={"math": 1.0}, skipped=("code",))] * 2
    code = [Score(value=0.5, terms={"code": 0.5}, skipped=("math",)), Score(value=None, terms={}, skipped=("math",))]
    figures = term_statistics([*sums, code[0]], all_scores=[*sums, *code])
    assert figures["reward/term_unscored/code"] == 0.5
    assert figures["reward/term_unscored/math"] == 0.0


Items = Sequence[tuple[Sequence[int], Sequence[int]]]


def count_tokens(items: Items, *, calibrated: bool) -> torch.Tensor:
    return torch.tensor([[float(100 * len(prompt) + len(completion)) for prompt, completion in items]])


def three_members(items: Items, *, calibrated: bool) -> torch.Tensor:
    """On every item 1, 2 and 6: mean 3, population std sqrt((4 + 1 + 9) / 3) = 2.160247; ten times as calibrated."""
    return torch.tensor([[1.0], [2.0], [6.0]]).repeat(1, len(items)) * (10.0 if calibrated else 1.0)


def test_a_score_is_shifted_scaled_and_clipped() -> None:
    """Prompts of 2 tokens: scores 201, 205, 209; minus 203, over 2: -1, 1, 3; clipped at 2."""
    rollouts = [make_rollout("", num_tokens=count) for count in (1, 5, 9)]
    options = RewardModelOptions(shift=203.0, scale=2.0, clip=2.0)
    scores = RewardModelReward(options, count_tokens)(rollouts)
    assert [score.value for score in scores] == [-1.0, 1.0, 2.0]
    assert scores[0].terms == {"reward_model": -1.0}


@pytest.mark.parametrize("shape", [(2,), (2, 1), ()])
def test_another_number_of_scores_is_refused(shape: tuple[int, ...]) -> None:
    reward = RewardModelReward(RewardModelOptions(), lambda items, calibrated: torch.zeros(shape))
    with pytest.raises(RewardError, match="2 completions"):
        reward([make_rollout(""), make_rollout("")])


def test_the_members_disagreement_is_a_penalty_and_a_part() -> None:
    calibrated = RewardModelOptions(calibrated=True)
    assert RewardModelReward(calibrated, three_members)([make_rollout("")])[0].value == 30.0
    # 3 - 0.5 * 2.160247 = 1.919877
    options = RewardModelOptions(uncertainty_penalty=0.5)
    (score,) = RewardModelReward(options, three_members)([make_rollout("")])
    assert score.value == pytest.approx(1.919877, abs=1e-6)
    assert score.terms == {"reward_model": score.value, "reward_model_std": pytest.approx(2.160247, abs=1e-6)}


def test_a_penalty_on_a_single_member_is_refused() -> None:
    with pytest.raises(RewardError, match="needs an ensemble"):
        RewardModelReward(RewardModelOptions(uncertainty_penalty=0.5), count_tokens)([make_rollout("")])
