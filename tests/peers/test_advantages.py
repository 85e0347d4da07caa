"""Our advantages against verl's and OpenRLHF's on the same rollouts.

Ours is float64; the bound is 1e-9 where the peer computes in it too. Where a convention differs, the conversion stands
in the test with its reason.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import verl.trainer.ppo.core_algos as verl_algos
from verl.utils.torch_functional import masked_whiten as verl_whiten

from rlcore.algorithms import advantages
from rlcore.algorithms.advantages import STD_EPSILON
from tests.peers import openrlhf_functions as openrlhf
from tests.peers.tensors import Padded, assert_equal, draw

pytestmark = pytest.mark.peers

SEEDS = range(5)
BOUND = 1e-9
FLOAT32 = 1e-6  # verl's vectorised forms and OpenRLHF compute in float32


def per_completion(rollouts: Padded, per_token: torch.Tensor) -> torch.Tensor:
    """The advantage [S] that all tokens of a completion share."""
    first = rollouts.mask.float().argmax(1)
    return per_token[torch.arange(len(first)), first]


def group_std(rollouts: Padded, *, ddof: int) -> torch.Tensor:
    """Standard deviation of each completion's group, [S]."""
    size = int((rollouts.group == 0).sum())
    return rollouts.rewards.view(-1, size).std(-1, correction=ddof).repeat_interleave(size)


@pytest.mark.parametrize("tool_output", [False, True])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.99, 0.9), (1.0, 1.0), (0.9, 0.0)])
def test_gae_equals_verls_also_across_tool_output(gamma: float, lam: float, tool_output: bool) -> None:
    for seed in SEEDS:
        rollouts = draw(seed, tool_output=tool_output)
        whitened, returns = verl_algos.compute_gae_advantage_return(
            rollouts.token_rewards, rollouts.values, rollouts.mask.double(), gamma, lam
        )
        ours = advantages.gae(rollouts.episodes, gamma=gamma, lam=lam)
        # verl gives the raw advantages only inside its returns, A + V.
        assert_equal(ours[rollouts.mask], (returns - rollouts.values)[rollouts.mask], BOUND)
        assert_equal(_as_verl_whitens(ours, rollouts.mask)[rollouts.mask], whitened[rollouts.mask], BOUND)


def _as_verl_whitens(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """verl divides by the sample std (n - 1) and adds 1e-8 to the variance; we divide by the population std."""
    variance = values[mask].double().var(correction=0)
    count = float(mask.sum())
    factor = torch.sqrt(variance / (variance * count / (count - 1) + 1e-8))
    return advantages.whiten(values, mask).double() * factor


def test_whitening_equals_verls_up_to_the_sample_std() -> None:
    for seed in SEEDS:
        rollouts = draw(seed, tool_output=True)
        theirs = verl_whiten(rollouts.values, rollouts.mask.double())
        ours = _as_verl_whitens(rollouts.values, rollouts.mask)
        assert_equal(ours[rollouts.mask], theirs[rollouts.mask], BOUND)


@pytest.mark.parametrize("name", ["compute_grpo_outcome_advantage", "compute_grpo_vectorized_outcome_advantage"])
def test_group_advantages_equal_verls_up_to_the_sample_std(name: str) -> None:
    for seed in SEEDS:
        rollouts = draw(seed)
        theirs, _ = getattr(verl_algos, name)(rollouts.token_rewards, rollouts.mask.double(), rollouts.index)
        # The paper does not say which std; verl and TRL take n - 1, we take n. A constant factor at a fixed group size.
        factor = (group_std(rollouts, ddof=0) + STD_EPSILON) / (group_std(rollouts, ddof=1) + 1e-6)
        ours = advantages.group_normalized(rollouts.episodes) * factor[:, None]
        assert_equal(ours, theirs, FLOAT32)


def test_group_advantages_by_the_sample_std_equal_verls() -> None:
    for seed in SEEDS:
        rollouts = draw(seed)
        theirs, _ = verl_algos.compute_grpo_outcome_advantage(
            rollouts.token_rewards, rollouts.mask.double(), rollouts.index
        )
        assert_equal(advantages.group_relative(rollouts.episodes, scale="group_sample"), theirs, BOUND)


def test_group_advantages_equal_openrlhfs_up_to_the_sample_std() -> None:
    for seed in SEEDS:
        rollouts = draw(seed)
        theirs = openrlhf.advantages(rollouts.rewards, group_size=4, estimator="group_norm", mask=rollouts.mask)
        factor = (group_std(rollouts, ddof=0) + STD_EPSILON) / (group_std(rollouts, ddof=1) + 1e-9)
        ours = advantages.group_normalized(rollouts.episodes) * factor[:, None]
        assert_equal(ours, theirs, FLOAT32)


def test_centred_advantages_equal_verls_and_openrlhfs() -> None:
    for seed in SEEDS:
        rollouts = draw(seed)
        ours = advantages.group_centered(rollouts.episodes)
        theirs, _ = verl_algos.compute_grpo_outcome_advantage(
            rollouts.token_rewards, rollouts.mask.double(), rollouts.index, norm_adv_by_std_in_grpo=False
        )
        assert_equal(ours, theirs, BOUND)
        others = openrlhf.advantages(rollouts.rewards, group_size=4, estimator="dr_grpo", mask=rollouts.mask)
        assert_equal(ours, others, FLOAT32)


def test_leave_one_out_equals_verls_and_openrlhfs() -> None:
    for seed in SEEDS:
        rollouts = draw(seed)
        ours = advantages.leave_one_out(rollouts.episodes)
        for name in ("compute_rloo_outcome_advantage", "compute_rloo_vectorized_outcome_advantage"):
            theirs, _ = getattr(verl_algos, name)(rollouts.token_rewards, rollouts.mask.double(), rollouts.index)
            assert_equal(ours, theirs, BOUND)
        others = openrlhf.advantages(rollouts.rewards, group_size=4, estimator="rloo", mask=rollouts.mask)
        assert_equal(ours, others, FLOAT32)


def test_batch_normalisation_equals_verls_where_completions_are_equally_long() -> None:
    # verl's REINFORCE++ takes mean and std over tokens, so that a long completion counts more in them; ours takes them
    # over completions. The two meet where all lengths are equal, up to n - 1 (of tokens) and the place of epsilon.
    for seed in SEEDS:
        rollouts = draw(seed, lengths=(6,) * 12)
        theirs, _ = verl_algos.compute_reinforce_plus_plus_outcome_advantage(
            rollouts.token_rewards, rollouts.mask.double(), config=SimpleNamespace(gamma=1.0)
        )
        population = rollouts.rewards.std(correction=0)
        num_tokens = float(rollouts.mask.sum())
        sample = torch.sqrt(population**2 * num_tokens / (num_tokens - 1) + 1e-8)
        ours = advantages.batch_normalized(rollouts.episodes) * (population + STD_EPSILON) / sample
        assert_equal(ours, theirs, BOUND)


def test_batch_normalisation_gives_completions_the_weight_that_verl_gives_tokens() -> None:
    rollouts = draw(0)
    ours = per_completion(rollouts, advantages.batch_normalized(rollouts.episodes)).double()
    theirs, _ = verl_algos.compute_reinforce_plus_plus_outcome_advantage(
        rollouts.token_rewards, rollouts.mask.double(), config=SimpleNamespace(gamma=1.0)
    )
    assert abs(float(ours.mean())) < 1e-6
    assert abs(float(theirs[rollouts.mask].mean())) < 1e-6
    assert abs(float(per_completion(rollouts, theirs).mean())) > 0.01
