"""Fitting whole reward models: planted confounders, members that differ, labels that were flipped."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import torch

from rlcore.config import BackboneConfig, LoraConfig, RewardModelConfig
from rlcore.errors import DataError
from rlcore.examples import arithmetic
from rlcore.models.heads import ScalarHeadModel
from rlcore.models.lora import add_lora
from rlcore.models.reward_ensemble import RewardModel, raw_scores
from rlcore.models.reward_scale import RewardScales
from rlcore.text.packing import TokenSequence
from rlcore.training.label_audit import audit_labels, linear_pairs
from rlcore.training.preferences import TokenPair
from rlcore.training.reward_calibration import cluster_bootstrap
from rlcore.training.reward_fit import Fitted, fit_reward_model, measure_scales, resample
from rlcore.training.reward_learner import RewardLearner, reward_members
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
    """One brisk epoch of a whole tiny backbone, without an audit."""
    brisk = {
        "num_epochs": 2,
        "batch_size": 16,
        "learning_rate": 3e-3,
        "head_learning_rate": 3e-2,
        "audit_folds": 0,
    }
    return RewardModelConfig(**(brisk | settings))


def fit(pairs: list[TokenPair], base: Any = None, **settings: Any) -> tuple[tuple[ScalarHeadModel, ...], Fitted]:
    """Fitted members, from a fresh backbone where none is given."""
    wanted = config(**settings)
    learner = RewardLearner(reward_members(base or strategies.tiny_llama(), wanted, seed=0), wanted)
    return learner.members, fit_reward_model(learner, pairs, wanted, seed=0, report=lambda step, metrics: None)


def rewards_of(members: tuple[ScalarHeadModel, ...], scales: RewardScales, pairs: list[TokenPair]) -> torch.Tensor:
    """Rewards of the sides of pairs, [M, P, 2]."""
    model = RewardModel(members=members, scales=scales)
    return model.rewards([side for pair in pairs for side in pair.sides], tokens_per_microbatch=2048).unflatten(
        1, (-1, 2)
    )


@pytest.mark.parametrize("layers", [-1, 0])
def test_without_the_planted_effect_of_length_reversed_pairs_are_judged_better(layers: int) -> None:
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


def test_an_adapter_learns_the_rule_on_a_base_that_stays_as_it_was_and_is_held_once() -> None:
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


def test_rewards_are_centred_over_training_completions_and_not_over_others() -> None:
    train = pairs_with_length(60, seed=0, share_longer=0.5)
    members, fitted = fit(train)
    scales = RewardScales(members=measure_scales(fitted, train, length_debias=False, seed=0))
    rewards = rewards_of(members, scales, train)
    assert float(rewards.mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(rewards.std(unbiased=False)) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("layers", [-1, 0])
def test_members_disagree_more_on_what_they_have_not_seen_the_like_of(layers: int) -> None:
    train = in_words(pairs_with_length(160, seed=0, share_longer=0.5, noise=0.1), first=6, count=5)
    members, fitted = fit(train, ensemble=4, backbone=BackboneConfig(trainable_layers=layers))
    scales = RewardScales(members=measure_scales(fitted, train, length_debias=False, seed=0))
    unseen = pairs_with_length(100, seed=1, share_longer=0.5, noise=0.1)
    near, far = (
        rewards_of(members, scales, pairs).std(dim=0, unbiased=False).mean(dim=1)
        for pairs in (in_words(unseen, first=6, count=5), in_words(unseen, first=11, count=18))
    )
    more = cluster_bootstrap(lambda rows: float((far - near)[rows].mean()), np.arange(100), seed=0)
    assert more.low > 0.0, (float(near.mean()), float(far.mean()))


def in_words(pairs: list[TokenPair], *, first: int, count: int) -> list[TokenPair]:
    """The same pairs in other words: tokens ``first`` to ``first + count - 1``, the good token apart."""

    def spell(tokens: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(token if token == GOOD else first + token % count for token in tokens)

    return [
        dataclasses.replace(
            pair,
            prompt_ids=spell(pair.prompt_ids),
            chosen_ids=spell(pair.chosen_ids),
            rejected_ids=spell(pair.rejected_ids),
        )
        for pair in pairs
    ]


def test_heads_of_a_frozen_backbone_give_training_completions_the_score_that_the_model_gives_them() -> None:
    train = pairs_with_length(60, seed=0, share_longer=0.5)
    members, fitted = fit(train, ensemble=2, backbone=BackboneConfig(trainable_layers=0))
    sequences = [side for pair in train[:10] for side in pair.sides]
    torch.testing.assert_close(
        fitted.score(sequences), raw_scores(members, sequences, tokens_per_microbatch=512), rtol=1e-4, atol=1e-4
    )


def test_a_resample_draws_prompts_with_their_pairs_and_keeps_draws_apart() -> None:
    pairs = pairs_with_length(30, seed=0, share_longer=0.5)
    pairs.append(dataclasses.replace(pairs[0], chosen_ids=(9, 9)))  # a second pair of the first set
    drawn = resample(pairs, seed=1)
    assert len({(pair.set_id, pair.chosen_ids, pair.rejected_ids) for pair in drawn}) == len(drawn)
    assert 12 <= len({pair.prompt_ids for pair in drawn}) <= 24  # 1 - 1/e of 30 is 19
    per_set = [pair.set_id for pair in drawn if pair.prompt_ids == pairs[0].prompt_ids]
    assert len(per_set) == 2 * len(set(per_set))


def test_no_pairs_are_refused() -> None:
    with pytest.raises(DataError, match="no preference pairs to train on"):
        fit([])


def test_length_cannot_be_taken_out_where_all_pairs_have_sides_of_one_length() -> None:
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


def test_flipped_labels_of_arithmetic_preferences_stand_at_the_top_of_the_audit() -> None:
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
