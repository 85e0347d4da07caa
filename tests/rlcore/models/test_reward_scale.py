"""Raw scores to rewards: centring, the slope of length, and files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcore.errors import DataError, ModelError
from rlcore.models.reward_scale import RewardScale, RewardScales, fit_length_slope, measure_scale


def test_rewards_have_mean_zero_and_std_one_over_the_reference_set() -> None:
    # 1, 3, 5: mean 3, population variance (4 + 0 + 4) / 3 = 2.6667, std 1.6330.
    scores, lengths = torch.tensor([1.0, 3.0, 5.0]), torch.tensor([1.0, 2.0, 3.0])
    scale = measure_scale(scores, lengths)
    assert (scale.shift, scale.scale) == (3.0, pytest.approx(1.6330, abs=5e-5))
    rewards = scale.centered(scores, lengths) / scale.scale
    assert float(rewards.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(rewards.std(unbiased=False)) == pytest.approx(1.0)


def test_equal_scores_are_only_shifted() -> None:
    scale = measure_scale(torch.full((4,), 0.7), torch.ones(4))
    assert (scale.shift, scale.scale) == (pytest.approx(0.7), 1.0)


def test_the_slope_is_that_of_the_line_through_the_margins() -> None:
    # Margins 2 + 3 x at x = -1, 0, 1, 2: quality 2, slope 3. Through the origin it would be 22 / 6 = 3.67.
    ratios = torch.tensor([-1.0, 0.0, 1.0, 2.0])
    assert fit_length_slope(2.0 + 3.0 * ratios, ratios) == pytest.approx(3.0)


@given(st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), min_size=3, max_size=20))
def test_without_the_slope_margins_do_not_go_with_length(points: list[tuple[float, float]]) -> None:
    margins, ratios = torch.tensor(points, dtype=torch.float64).T
    if float((ratios - ratios.mean()).abs().max()) < 1e-3:
        return
    left = margins - fit_length_slope(margins, ratios) * ratios
    assert float((left - left.mean()) @ (ratios - ratios.mean())) == pytest.approx(0.0, abs=1e-8)


def test_a_debiased_score_loses_the_slope_times_the_log_of_the_length() -> None:
    # 5 - 2 ln(e^1) = 3; 5 - 2 ln(1) = 5
    scale = RewardScale(shift=0.0, scale=1.0, length_slope=2.0)
    debiased = scale.debias(torch.tensor([5.0, 5.0]), torch.tensor([torch.e, 1.0]))
    assert debiased.tolist() == pytest.approx([3.0, 5.0])


def test_a_slope_needs_different_ratios_of_lengths() -> None:
    with pytest.raises(DataError, match="length bias cannot be measured"):
        fit_length_slope(torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.5]))


def test_scales_come_back_from_their_file(tmp_path: Path) -> None:
    members = (RewardScale(shift=0.1, scale=2.0, length_slope=-0.3), RewardScale(shift=1 / 3, scale=1.0))
    scales = RewardScales(members=members, temperature=1.7)
    scales.save(tmp_path)
    assert RewardScales.load(tmp_path) == scales


@pytest.mark.parametrize("text", ["", "[]", '{"members": [{}], "temperature": 1}', '{"members": []}'])
def test_a_missing_or_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    if text:
        (tmp_path / "reward_scale.json").write_text(text)
    with pytest.raises(ModelError, match="cannot be read"):
        RewardScales.load(tmp_path)
