"""Metrics of an update: means over tokens, sums over micro-batches, means over steps."""

from __future__ import annotations

import pytest
import torch

from rlcore.algorithms.objective import LossOutput
from rlcore.training.update_stats import StatAccumulator


def output(num_tokens: int, loss: float = 0.0, **sums: float) -> LossOutput:
    """The outcome of one micro-batch."""
    named = {"kl/old": 0.0, "clip/low": 0.0, "clip/high": 0.0, "mismatch/weight": 1.0, "mismatch/weight_squared": 1.0}
    named |= {name.replace("__", "/"): value for name, value in sums.items()}
    return LossOutput(
        loss=torch.tensor(loss),
        sums={name: torch.tensor(value) for name, value in named.items()},
        maxima={"mismatch/max_abs": torch.tensor(float(num_tokens))},
        num_tokens=torch.tensor(num_tokens),
    )


def test_tokens_are_averaged_over_all_tokens_not_over_micro_batches() -> None:
    # 6 over 2 tokens and 0 over 4: the mean is 1, while the mean of means would be 1.5.
    totals = StatAccumulator()
    totals.add(output(2, kl__old=6.0))
    totals.add(output(4, kl__old=0.0))
    assert totals.means()["kl/old"] == 1.0
    assert totals.means()["mismatch/max_abs"] == 4.0


def test_losses_add_up_within_a_step_and_are_averaged_over_steps() -> None:
    totals = StatAccumulator()
    for _ in range(2):  # two steps of two micro-batches
        totals.add(output(1, loss=0.25))
        totals.add(output(1, loss=0.5))
        totals.record("gradient_norm", 3.0)
    totals.record("gradient_norm", 9.0)
    assert totals.means()["loss/policy"] == pytest.approx(1.5 / 3)
    assert totals.means()["gradient_norm"] == 5.0


def test_the_effective_sample_size_is_a_share_of_the_tokens() -> None:
    # Weights 1 and 2: (1 + 2)^2 / (2 * (1 + 4)) = 0.9.
    totals = StatAccumulator()
    totals.add(output(2, mismatch__weight=3.0, mismatch__weight_squared=5.0))
    means = totals.means()
    assert means["mismatch/ess"] == pytest.approx(0.9)
    assert not {"mismatch/weight", "mismatch/weight_squared"} & means.keys()


def test_the_clip_fraction_is_the_sum_of_both_sides() -> None:
    totals = StatAccumulator()
    totals.add(output(10, clip__low=1.0, clip__high=2.0))
    assert totals.means()["clip/fraction"] == pytest.approx(0.3)


def test_an_epoch_counts_from_its_own_beginning() -> None:
    totals = StatAccumulator()
    totals.add(output(2, kl__old=2.0))
    totals.begin_epoch()
    assert totals.epoch_mean("kl/old") == 0.0
    totals.add(output(4, kl__old=12.0))
    assert totals.epoch_mean("kl/old") == 3.0


def test_an_update_that_trained_nothing_has_no_token_metrics() -> None:
    assert StatAccumulator().means() == {}
