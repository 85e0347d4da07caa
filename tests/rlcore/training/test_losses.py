"""The critic's loss over a micro-batch: the weighted sum of its tokens' terms."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from rlcore.config import CriticConfig
from rlcore.text.packing import pack
from rlcore.training.losses import critic_loss
from rlcore.training.minibatches import Columns, token_sequences
from rlcore.training.update_stats import StatAccumulator
from rlcore.types import TrainingSample
from tests import strategies


def one_sample(*, returns: list[float], loss_mask: list[bool]) -> TrainingSample:
    """A completion of three tokens whose values were 0 before the update."""
    (sample,) = strategies.random_samples(0, num_prompts=1, group_size=1)
    zeros = torch.zeros(3)
    names = ("sampler_logprobs", "old_logprobs", "ref_logprobs", "advantages", "values")
    return dataclasses.replace(
        sample,
        completion_ids=(3, 4, 5),
        loss_mask=torch.tensor(loss_mask),
        returns=torch.tensor(returns),
        **dict.fromkeys(names, zeros),
    )


def columns_of(sample: TrainingSample) -> Columns:
    (batch,) = pack(token_sequences([sample]), tokens_per_microbatch=64)
    return Columns([sample], [torch.tensor([0.5, 0.25, 0.25])], batch)


def test_the_loss_is_the_weighted_sum_and_is_counted() -> None:
    # Errors 1, -2, 3: squares 1, 4, 9, halved, times 0.5, 0.25, 0.25: 0.25 + 0.5 + 1.125.
    columns = columns_of(one_sample(returns=[0.0, 3.0, 0.0], loss_mask=[True, True, True]))
    totals = StatAccumulator()
    loss = critic_loss(columns, torch.tensor([1.0, 1.0, 3.0]), CriticConfig(clip_range=0.0), totals)
    assert float(loss) == pytest.approx(1.875)
    assert totals.means()["loss/value"] == pytest.approx(1.875)


def test_the_clip_is_around_the_values_of_before_the_update() -> None:
    # Old value 0, range 0.2: a value of 1 with return 1 counts as 0.2, so (0.2 - 1)² / 2 * 0.5 = 0.16.
    columns = columns_of(one_sample(returns=[1.0, 0.0, 0.0], loss_mask=[True, True, True]))
    loss = critic_loss(columns, torch.tensor([1.0, 0.0, 0.0]), CriticConfig(clip_range=0.2), StatAccumulator())
    assert float(loss) == pytest.approx(0.16)


def test_a_masked_token_has_neither_loss_nor_gradient_whatever_its_target() -> None:
    columns = columns_of(one_sample(returns=[0.0, math.nan, 0.0], loss_mask=[True, False, True]))
    predicted = torch.tensor([1.0, 5.0, 0.0], requires_grad=True)
    loss = critic_loss(columns, predicted, CriticConfig(clip_range=0.0), StatAccumulator())
    (gradient,) = torch.autograd.grad(loss, predicted)
    assert float(loss.detach()) == pytest.approx(0.25)
    assert gradient.tolist() == [0.5, 0.0, 0.0]
