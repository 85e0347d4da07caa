"""Fits of whole reward models: confounders, ensembles, flipped labels, the exact head and calibration."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from rlcore.config import BackboneConfig, LoraConfig, RewardModelConfig
from rlcore.errors import DataError
from rlcore.evaluation.intervals import cluster_bootstrap
from rlcore.examples import arithmetic
from rlcore.models.heads import ScalarHeadModel
from rlcore.models.lora import add_lora
from rlcore.models.reward_ensemble import RewardModel, RewardScales, raw_scores
from rlcore.text.packing import TokenSequence
from rlcore.training.label_audit import (
    LinearPairs,
    audit_labels,
    choose_l2,
    cross_fitted_margins,
    fit_head,
    folds_of,
    linear_pairs,
)
from rlcore.training.preferences import TokenPair
from rlcore.training.reward_calibration import (
    accuracy_by_length,
    brier_score,
    correlation,
    fit_temperature,
    reliability_table,
    within_groups,
)
from rlcore.training.reward_model import (
    Fitted,
    RewardLearner,
    fit_reward_model,
    measure_scales,
    resample,
    reward_members,
)
from tests import strategies

GOOD = 5  # the rule: the completion that ends with this token is the better one


def pairs_with_length(count: int, seed: int, *, share_longer: float, noise: float = 0.3) -> list[TokenPair]:
    """The better side ends with the good token, save for a share ``noise``; in a share of the pairs it is longer."""
    draw = random.Random(seed)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(draw.randrange(6, strategies.VOCABULARY) for _ in range(length))

    made = []
    for number in range(count):
        short, long = draw.randint(2, 4), draw.randint(6, 12)
        better, worse = (long, short) if draw.random() < share_longer else (short, long)
        chosen = tokens(better) if draw.random() < noise else (*tokens(better - 1), GOOD)
        pair = TokenPair(set_id=str(number), prompt_ids=(1, *tokens(3)), chosen_ids=chosen, rejected_ids=tokens(worse))
        made.append(pair)
    return made


def config(**settings: Any) -> RewardModelConfig:
    brisk = {
        "num_epochs": 2,
        "batch_size": 16,
        "learning_rate": 3e-3,
        "head_learning_rate": 3e-2,
        "audit_folds": 0,
    }
    return RewardModelConfig(**(brisk | settings))


def fit(pairs: list[TokenPair], base: Any = None, **settings: Any) -> tuple[tuple[ScalarHeadModel, ...], Fitted]:
    wanted = config(**settings)
    learner = RewardLearner(reward_members(base or strategies.tiny_llama(), wanted, seed=0), wanted)
    return learner.members, fit_reward_model(learner, pairs, wanted, seed=0, report=lambda step, metrics: None)


def rewards_of(members: tuple[ScalarHeadModel, ...], scales: RewardScales, pairs: list[TokenPair]) -> torch.Tensor:
    model = RewardModel(members=members, scales=scales)
    return model.rewards([side for pair in pairs for side in pair.sides], tokens_per_microbatch=2048).unflatten(
        1, (-1, 2)
    )


@pytest.mark.parametrize("layers", [-1, 0])
def test_length_debias_helps_on_reversed_pairs(layers: int) -> None:
    train = pairs_with_length(400, seed=0, share_longer=0.9, noise=0.5)
    reversed_pairs = pairs_with_length(400, seed=1, share_longer=0.0, noise=0.0)
    members, fitted = fit(train, backbone=BackboneConfig(trainable_layers=layers))
    right = []
    for length_debias in (False, True):
        scales = RewardScales(members=measure_scales(fitted, train, length_debias=length_debias, seed=0))
        rewards = rewards_of(members, scales, reversed_pairs)[0]
        right.append((rewards[:, 0] > rewards[:, 1]).double().numpy())
    gain = cluster_bootstrap(lambda rows: float((right[1] - right[0])[rows].mean()), np.arange(400), seed=0)
    assert gain.low > 0.0, (right[0].mean(), right[1].mean())


def test_reward_adapter_learns_on_frozen_base() -> None:
    base = strategies.tiny_llama()
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    adapted = add_lora(base, LoraConfig(rank=4), "reward_model", seed=0)
    pairs = pairs_with_length(160, seed=0, share_longer=0.5, noise=0.0)
    adapter = BackboneConfig(lora=LoraConfig(rank=4))
    (member,), fitted = fit(pairs, adapted, backbone=adapter, audit_folds=2, learning_rate=1e-2)
    assert member.backbone is adapted
    assert all(
        torch.equal(tensor, before[name.replace(".base_layer.", ".")])
        for name, tensor in base.state_dict().items()
        if ".lora_" not in name
    )
    assert all(bool(parameter.any()) for parameter in adapted.parameters())  # B was 0 before
    learned = fitted.score([side for pair in pairs for side in pair.sides])[0].unflatten(0, (-1, 2))
    adapted.requires_grad_(False).name = ""
    plain = fitted.score([side for pair in pairs for side in pair.sides])[0].unflatten(0, (-1, 2))
    right, right_without = ((scores[:, 0] > scores[:, 1]).double().mean() for scores in (learned, plain))
    assert float(right) > 0.9
    assert float(right) > float(right_without)


def test_rewards_are_centered_over_training_completions() -> None:
    train = pairs_with_length(60, seed=0, share_longer=0.5)
    members, fitted = fit(train)
    scales = RewardScales(members=measure_scales(fitted, train, length_debias=False, seed=0))
    rewards = rewards_of(members, scales, train)
    assert float(rewards.mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(rewards.std(unbiased=False)) == pytest.approx(1.0, abs=1e-5)


def test_fitted_scores_equal_model_scores() -> None:
    train = pairs_with_length(60, seed=0, share_longer=0.5)
    members, fitted = fit(train, ensemble=2, backbone=BackboneConfig(trainable_layers=0))
    sequences = [side for pair in train[:10] for side in pair.sides]
    scores = fitted.score(sequences)
    torch.testing.assert_close(scores, raw_scores(members, sequences, tokens_per_microbatch=512), rtol=1e-4, atol=1e-4)
    assert float((scores[0] - scores[1]).std()) > 0.01  # each learned from its own resample


def test_resample_draws_prompts_with_pairs() -> None:
    pairs = pairs_with_length(30, seed=0, share_longer=0.5)
    pairs.append(dataclasses.replace(pairs[0], chosen_ids=(9, 9)))  # a second pair of the first set
    drawn = resample(pairs, seed=1)
    assert len({(pair.set_id, pair.chosen_ids, pair.rejected_ids) for pair in drawn}) == len(drawn)
    assert 12 <= len({pair.prompt_ids for pair in drawn}) <= 24  # 1 - 1/e of 30 is 19
    per_set = [pair.set_id for pair in drawn if pair.prompt_ids == pairs[0].prompt_ids]
    assert len(per_set) == 2 * len(set(per_set))


def test_fit_without_pairs_is_refused() -> None:
    with pytest.raises(DataError, match="no preference pairs to train on"):
        fit([])


def test_length_debias_needs_different_lengths() -> None:
    pairs = [
        dataclasses.replace(p, chosen_ids=(7, n % 20), rejected_ids=(8, 9))
        for n, p in enumerate(pairs_with_length(20, seed=0, share_longer=0.5))
    ]
    with pytest.raises(DataError, match="length bias cannot be measured"):
        measure_scales(fit(pairs)[1], pairs, length_debias=True, seed=0)


def found_first(doubt: np.ndarray, flipped: np.ndarray) -> float:
    """The chance that a flipped label is doubted more than another one, a tie counting half."""
    gaps = doubt[flipped][:, None] - doubt[~flipped][None, :]
    return float(np.heaviside(gaps, 0.5).mean())


def test_audit_finds_flipped_labels() -> None:
    """5 % of 400 pairs are flipped; the judge knows of each side whether it is worked and whether its end is right.

    The features replace the states of a backbone that knows some arithmetic; the audit has to find the labels.
    """
    rows = arithmetic.generate_pairs(random.Random(0), num_train=400, num_eval=1)
    rows = [row for row in rows if row["split"] == "train"]
    flipped = np.zeros(len(rows), dtype=bool)
    flipped[random.Random(1).sample(range(len(rows)), len(rows) // 20)] = True
    pairs, features = [], {}
    noise = torch.Generator().manual_seed(0)
    for number, (row, is_flipped) in enumerate(zip(rows, flipped, strict=True)):
        sides = [tuple(row[name].encode()) for name in ("chosen", "rejected")]
        for side, text in zip(sides, (row["chosen"], row["rejected"]), strict=True):
            problem = row["messages"][0]["content"]
            is_right = float(text.endswith(f"#### {arithmetic.answer(problem)}"))
            known = torch.tensor([is_right, float(len(text) > 10)]) + 0.4 * torch.randn(2, generator=noise)
            sequence = TokenSequence(prompt_ids=(number,), completion_ids=side)
            features[sequence] = torch.cat([known, torch.randn(6, generator=noise)]).double()
        chosen, rejected = sides[::-1] if is_flipped else sides
        pairs.append(TokenPair(set_id=str(number), prompt_ids=(number,), chosen_ids=chosen, rejected_ids=rejected))
    suspects = audit_labels(linear_pairs(pairs, features), num_folds=5, seed=0)
    assert [one.margin for one in suspects] == sorted(one.margin for one in suspects)
    doubt = -np.array([one.margin for one in sorted(suspects, key=lambda one: one.row)])
    interval = cluster_bootstrap(lambda rows: found_first(doubt[rows], flipped[rows]), np.arange(len(pairs)), seed=0)
    top = [flipped[one.row] for one in suspects[: int(flipped.sum())]]
    assert interval.low > 0.8, interval
    assert np.mean(top) > 0.4  # eight times the base rate


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


def test_head_of_one_feature_by_hand() -> None:
    # Differences +1 and -1 with probability 0.8 and 0.2: the same pair twice. Their spread is 1, and the optimum of
    # -0.8 ln σ(w) - 0.2 ln σ(-w) + l2/2 w² has σ(w) - 0.8 + l2 w = 0: at w = ln 3, σ = 0.75, so l2 = 0.05 / ln 3.
    pairs = linear(torch.tensor([[1.0], [-1.0]]), probabilities=torch.tensor([0.8, 0.2], dtype=torch.float64))
    assert float(fit_head(pairs, l2=0.05 / math.log(3))) == pytest.approx(math.log(3), abs=1e-4)


def test_gradient_is_zero_at_fitted_head() -> None:
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


def test_units_of_features_do_not_matter() -> None:
    pairs = noisy(80, seed=1, features=3)
    wide = linear(torch.cat([1e3 * pairs.differences, torch.zeros(80, 1, dtype=torch.float64)], dim=1))
    head, wide_head = fit_head(pairs, l2=0.1), fit_head(wide, l2=0.1)
    assert float(wide_head[3]) == 0.0
    torch.testing.assert_close(1e3 * wide_head[:3], head)


def test_folds_never_share_a_prompt() -> None:
    prompts = torch.arange(40) // 2
    folds = folds_of(prompts, 5, seed=0)
    assert torch.bincount(folds).tolist() == [8] * 5
    assert torch.equal(folds[0::2], folds[1::2])
    assert not torch.equal(folds, folds_of(prompts, 5, seed=1))


def test_too_many_folds_are_refused() -> None:
    with pytest.raises(DataError, match="3 prompts cannot be divided into 5 folds"):
        folds_of(torch.tensor([0, 1, 2, 2]), 5, seed=0)


def test_cross_fitted_margin_ignores_own_label() -> None:
    pairs = noisy(50, seed=2)
    folds = folds_of(pairs.prompts, 5, seed=0)
    before = cross_fitted_margins(pairs, folds, l2=0.1)
    swapped = pairs.differences.clone()
    swapped[7] *= -1.0
    after = cross_fitted_margins(linear(swapped), folds, l2=0.1)
    assert float(after[7]) == pytest.approx(-float(before[7]))
    assert not torch.allclose(after[folds != folds[7]], before[folds != folds[7]])


def test_noise_needs_stronger_l2() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = linear(torch.randn(60, 20, generator=generator))
    clear = noisy(400, seed=3)
    strengths = [choose_l2(pairs, folds_of(pairs.prompts, 5, seed=0)) for pairs in (noise, clear)]
    assert strengths[0] > strengths[1]


def test_reliability_table_by_hand() -> None:
    # σ(0.1) = 0.525 and σ(-0.1): first bin, certainty 0.525, one of two right. σ(3) = 0.9526: the last but none.
    rows = reliability_table(np.array([0.1, -0.1, 3.0]), np.arange(3))
    assert [(row.num_pairs, row.low) for row in rows] == [(2, 0.5), (1, 0.95)]
    assert rows[0].confidence == pytest.approx(0.524979, abs=1e-6)
    assert (rows[0].accuracy.mean, rows[1].accuracy.mean) == (0.5, 1.0)


def test_clusters_widen_calibration_intervals() -> None:
    margins, prompts = np.tile([2.0, 2.0, 2.0, -2.0], 25), np.repeat(np.arange(25), 4)
    alike = np.repeat([2.0, 2.0, 2.0, -2.0], 25)
    (mixed,), (together,) = (reliability_table(each, prompts) for each in (margins, alike))
    assert mixed.accuracy.mean == together.accuracy.mean == 0.75
    assert together.accuracy.high - together.accuracy.low > 1.5 * (mixed.accuracy.high - mixed.accuracy.low)
    parts = [accuracy_by_length(each, np.ones(100), prompts)["longer"] for each in (margins, alike)]
    assert [(part.low, part.high) for part in parts] == [
        (mixed.accuracy.low, mixed.accuracy.high),
        (together.accuracy.low, together.accuracy.high),
    ]


def test_brier_by_hand() -> None:
    # (1 - 0.5)² = 0.25 and (1 - 0.75)² = 0.0625: mean 0.15625
    assert brier_score(np.array([0.0, math.log(3.0)])) == pytest.approx(0.15625)


def test_temperature_by_hand() -> None:
    # Three right and one wrong at margin 4: σ(4 / T) = 3/4 at 4 / T = ln 3, so T = 3.640957.
    assert fit_temperature(np.array([4.0, 4.0, 4.0, -4.0])) == pytest.approx(3.640957, abs=1e-4)


@pytest.mark.parametrize(("margins", "bound"), [([1.0, 2.0], math.exp(-4)), ([-1.0, -2.0], math.exp(4))])
def test_temperature_is_bounded(margins: list[float], bound: float) -> None:
    assert fit_temperature(np.array(margins)) == pytest.approx(bound, rel=1e-4)


def test_cluster_bootstrap_is_wider() -> None:
    values = np.repeat(np.random.default_rng(0).normal(size=40), 10)
    apart, together = (
        cluster_bootstrap(lambda rows: float(values[rows].mean()), clusters, seed=0)
        for clusters in (np.arange(400), np.repeat(np.arange(40), 10))
    )
    assert together.high - together.low > 2.5 * (apart.high - apart.low)  # sqrt(10) = 3.2


def test_correlation_by_hand() -> None:
    # x - 2 = -1, 0, 1; y - 3 = -1, -1, 2: 3 / sqrt(2 * 6) = 0.866025
    assert correlation(np.array([1.0, 2.0, 3.0]), np.array([2.0, 2.0, 5.0])) == pytest.approx(0.866025, abs=1e-6)
    assert correlation(np.ones(3), np.arange(3.0)) == 0.0


def test_within_groups_by_hand() -> None:
    assert within_groups(np.array([1.0, 5.0, 3.0, 7.0]), np.array([8, 2, 8, 2])).tolist() == [-1.0, -1.0, 1.0, 1.0]


def test_accuracy_by_length_by_hand() -> None:
    parts = accuracy_by_length(np.array([1.0, 1.0, -1.0, -1.0]), np.array([0.5, 0.1, -0.2, 0.3]), np.arange(4))
    assert {name: (part.mean, part.n) for name, part in parts.items()} == {
        "longer": (pytest.approx(2 / 3), 3),
        "shorter": (0.0, 1),
    }
