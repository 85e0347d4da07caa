"""The exact head: optimal, indifferent to the order of sides, judged by folds that never share a prompt."""

from __future__ import annotations

import math

import pytest
import torch

from rlcore.errors import DataError
from rlcore.training.linear_head import LinearPairs, choose_l2, cross_fitted_margins, fit_head, folds_of


def linear(differences: torch.Tensor, *, per_prompt: int = 1, **columns: torch.Tensor) -> LinearPairs:
    """Pairs without margins or doubts, of equal weight, unless said otherwise."""
    count = len(differences)
    ones = torch.ones(count, dtype=torch.float64)
    plain = {"margins": 0.0 * ones, "probabilities": ones, "weights": ones}
    return LinearPairs(differences=differences.double(), prompts=torch.arange(count) // per_prompt, **(plain | columns))


def noisy(count: int, seed: int, features: int = 5) -> LinearPairs:
    """The first feature decides, nine times in ten."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, features, generator=generator, dtype=torch.float64)
    sign = x[:, 0].sign() * torch.where(torch.rand(count, generator=generator) < 0.9, 1.0, -1.0)
    return linear(x * sign[:, None])


def test_one_feature_in_doubt_is_fitted_by_hand() -> None:
    # Differences +1 and -1 with probability 0.8 and 0.2: the same pair twice. Their spread is 1, and the optimum of
    # -0.8 ln σ(w) - 0.2 ln σ(-w) + l2/2 w² has σ(w) - 0.8 + l2 w = 0: at w = ln 3, σ = 0.75, so l2 = 0.05 / ln 3.
    pairs = linear(torch.tensor([[1.0], [-1.0]]), probabilities=torch.tensor([0.8, 0.2], dtype=torch.float64))
    assert float(fit_head(pairs, l2=0.05 / math.log(3))) == pytest.approx(math.log(3), abs=1e-4)


def test_the_gradient_of_the_objective_is_zero_at_the_head() -> None:
    base = noisy(60, seed=0)
    pairs = linear(
        base.differences,
        margins=torch.linspace(0, 1, 60, dtype=torch.float64),
        probabilities=torch.linspace(0.6, 1, 60, dtype=torch.float64),
        weights=torch.linspace(0.1, 1, 60, dtype=torch.float64),
    )
    head = fit_head(pairs, l2=0.1).requires_grad_(True)
    spread = pairs.differences.std(dim=0, unbiased=False)
    (pairs.loss(pairs.differences @ head) + 0.05 * ((spread * head) ** 2).sum()).backward()
    assert head.grad is not None
    assert float(head.grad.abs().max()) < 1e-4


def test_a_feature_that_never_differs_gets_no_weight_and_units_do_not_matter() -> None:
    pairs = noisy(80, seed=1, features=3)
    wide = linear(torch.cat([1e3 * pairs.differences, torch.zeros(80, 1, dtype=torch.float64)], dim=1))
    head, wide_head = fit_head(pairs, l2=0.1), fit_head(wide, l2=0.1)
    assert float(wide_head[3]) == 0.0
    torch.testing.assert_close(1e3 * wide_head[:3], head)


def test_folds_are_of_equal_size_and_never_share_a_prompt() -> None:
    prompts = torch.arange(40) // 2
    folds = folds_of(prompts, 5, seed=0)
    assert torch.bincount(folds).tolist() == [8] * 5
    assert torch.equal(folds[0::2], folds[1::2])
    assert not torch.equal(folds, folds_of(prompts, 5, seed=1))


def test_fewer_prompts_than_folds_are_refused() -> None:
    with pytest.raises(DataError, match="3 prompts cannot be divided into 5 folds"):
        folds_of(torch.tensor([0, 1, 2, 2]), 5, seed=0)


def test_a_cross_fitted_margin_does_not_depend_on_its_own_label() -> None:
    pairs = noisy(50, seed=2)
    folds = folds_of(pairs.prompts, 5, seed=0)
    before = cross_fitted_margins(pairs, folds, l2=0.1)
    swapped = pairs.differences.clone()
    swapped[7] *= -1.0
    after = cross_fitted_margins(linear(swapped), folds, l2=0.1)
    assert float(after[7]) == pytest.approx(-float(before[7]))
    assert not torch.allclose(after[folds != folds[7]], before[folds != folds[7]])


def test_noise_asks_for_a_stronger_pull_than_a_clear_rule() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = linear(torch.randn(60, 20, generator=generator))
    clear = noisy(400, seed=3)
    strengths = [choose_l2(pairs, folds_of(pairs.prompts, 5, seed=0)) for pairs in (noise, clear)]
    assert strengths[0] > strengths[1]
