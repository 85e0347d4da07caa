"""Laws that hold for every row of the table: they see the composition, where golden values see the parts."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from rlcore.algorithms.advantages import gae, length_adaptive_gae
from rlcore.algorithms.objective import Coefficients, LossInputs, LossOutput, policy_loss
from rlcore.algorithms.resolve import with_constants
from rlcore.algorithms.table import ALGORITHMS
from rlcore.config import RolloutCorrectionConfig
from tests import strategies

EVERY_ROW = pytest.mark.parametrize("name", sorted(ALGORITHMS))
COEFFICIENTS = Coefficients(
    kl=0.05, kl_estimator="k3_ratio", entropy=0.01, mismatch=RolloutCorrectionConfig(high=3.0), penalty=0.7
)
SURROGATE_ALONE = Coefficients(kl=0.0, kl_estimator="k2", entropy=0.0, mismatch=RolloutCorrectionConfig(mode="off"))
LENGTHS = (3, 5, 1, 4, 2, 6)
VOCABULARY = 9


@dataclasses.dataclass(frozen=True)
class Step:
    """One optimizer step of a policy that is a table of logits, one row per token; everything in float64."""

    logits: torch.Tensor
    inputs: LossInputs


def make_step(name: str, *, on_policy: bool, seed: int = 0) -> Step:
    """Two groups of three completions with the advantages and the weights of a row; one token is masked."""
    generator = torch.Generator().manual_seed(seed)
    count, algorithm = sum(LENGTHS), ALGORITHMS[name]

    def draw(scale: float) -> torch.Tensor:
        return torch.randn(count, generator=generator, dtype=torch.float64) * scale

    logits = torch.randn(count, VOCABULARY, generator=generator, dtype=torch.float64, requires_grad=True)
    distribution = logits.log_softmax(1)
    targets = torch.randint(0, VOCABULARY, (count,), generator=generator)
    policy = distribution.gather(1, targets[:, None]).squeeze(1)
    padded = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    mask = padded.clone()
    mask[1, 2] = False
    token_rewards = torch.zeros(mask.shape, dtype=torch.float64)
    rewards = torch.rand(6, generator=generator).tolist()
    for row, reward in enumerate(rewards):
        token_rewards[row, LENGTHS[row] - 1] = reward
    episodes = strategies.episodes(
        rewards,
        group=[0, 0, 0, 1, 1, 1],
        mask=mask,
        token_rewards=token_rewards,
        values=torch.rand(mask.shape, generator=generator),
    )
    inputs = LossInputs(
        policy_logprobs=policy,
        entropy=-(distribution.exp() * distribution).sum(1),
        old_logprobs=policy.detach() if on_policy else policy.detach() + draw(0.3),
        sampler_logprobs=policy.detach() + draw(0.1),
        ref_logprobs=policy.detach() + draw(0.5),
        advantages=algorithm.advantage(episodes).double()[padded],
        weights=algorithm.weighting(mask, strategies.one_each(mask)).double()[padded],
        loss_mask=mask[padded],
        sequence_index=torch.arange(6).repeat_interleave(torch.tensor(LENGTHS)),
    )
    return Step(logits, inputs)


def gradient(loss: torch.Tensor, step: Step) -> torch.Tensor:
    """Gradient with respect to the logits."""
    return torch.autograd.grad(loss, step.logits, retain_graph=True)[0]


def run(name: str, inputs: LossInputs, coefficients: Coefficients = COEFFICIENTS) -> LossOutput:
    """The loss under a row of the table."""
    return policy_loss(inputs, ALGORITHMS[name], coefficients)


@EVERY_ROW
def test_the_on_policy_gradient_is_the_plain_policy_gradient(name: str) -> None:
    step = make_step(name, on_policy=True)
    inputs = step.inputs
    plain = -(inputs.weights * inputs.advantages * inputs.policy_logprobs)[inputs.loss_mask].sum()
    ours = gradient(run(name, inputs, SURROGATE_ALONE).loss, step)
    assert float(ours.norm()) > 1e-5  # Dr. GRPO divides by 1,024
    torch.testing.assert_close(ours, gradient(plain, step), rtol=1e-9, atol=1e-12)


@EVERY_ROW
def test_on_the_first_pass_the_ratio_is_one_and_nothing_is_clipped(name: str) -> None:
    output = run(name, make_step(name, on_policy=True).inputs)
    assert [float(output.sums[metric]) for metric in ("clip/low", "clip/high", "kl/old")] == [0.0, 0.0, 0.0]


@EVERY_ROW
def test_nan_in_masked_places_changes_nothing(name: str) -> None:
    step = make_step(name, on_policy=False)
    hole = ~step.inputs.loss_mask
    assert int(hole.sum()) == 1
    filled = {
        field: getattr(step.inputs, field).masked_fill(hole, math.nan)
        for field in LossInputs.__dataclass_fields__
        if field not in ("loss_mask", "sequence_index")
    }
    dirty = run(name, dataclasses.replace(step.inputs, **filled))
    clean = run(name, step.inputs)
    assert torch.equal(gradient(dirty.loss, step), gradient(clean.loss, step))
    assert torch.equal(dirty.loss, clean.loss)
    assert {**dirty.sums, **dirty.maxima} == {**clean.sums, **clean.maxima}


@EVERY_ROW
def test_a_better_completion_becomes_more_likely(name: str) -> None:
    step = make_step(name, on_policy=True)
    moved = step.logits.detach() - 1e-3 * gradient(run(name, step.inputs, SURROGATE_ALONE).loss, step)
    gain = moved.log_softmax(1) - step.logits.detach().log_softmax(1)
    best = step.inputs.advantages == step.inputs.advantages.max()
    worst = step.inputs.advantages == step.inputs.advantages.min()
    probabilities = step.inputs.policy_logprobs.detach()

    def of_targets(tokens: torch.Tensor) -> float:
        rows = tokens.nonzero().squeeze(1)
        table = step.logits.detach().log_softmax(1)[rows]
        targets = (table - probabilities[rows, None]).abs().argmin(1)
        return float(gain[rows, targets].mean())

    assert of_targets(best) > 0.0
    if float(step.inputs.advantages.min()) < 0.0:  # a row without a baseline has none below 0 here
        assert of_targets(worst) < 0.0


@EVERY_ROW
def test_a_row_asks_for_a_critic_exactly_when_its_advantages_read_one(name: str) -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    with_critic, without = (
        ALGORITHMS[name].advantage(strategies.episodes([1.0, 0.0], group=[0, 0], mask=mask, values=values))
        for values in (torch.rand(2, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(2, 3))
    )
    assert ALGORITHMS[name].uses_critic == (not torch.equal(with_critic, without))


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("ppo", (0.2, 0.2)),
        ("grpo", (0.2, 0.2)),
        ("dr_grpo", (0.2, 0.2)),
        ("dapo", (0.2, 0.28)),
        ("gspo", (3e-4, 4e-4)),
        ("cispo", (1.0, 0.28)),
        ("rloo", (0.2, 0.2)),
        ("reinforce++", (0.2, 0.2)),
        ("dppo_tv", (0.15, 0.15)),
        ("maxrl", (0.2, 0.2)),
    ],
)
def test_a_row_of_a_paper_clips_at_the_papers_bounds(name: str, bounds: tuple[float, float]) -> None:
    keywords = ALGORITHMS[name].surrogate.keywords  # type: ignore[attr-defined]
    assert (keywords["clip_low"], keywords["clip_high"]) == bounds


def test_sapo_has_the_papers_gates() -> None:
    assert ALGORITHMS["sapo"].surrogate.keywords == {  # type: ignore[attr-defined]
        "gate_positive": 1.0,
        "gate_negative": 1.05,
    }


def test_a_run_sets_the_constants_of_gae_and_of_dr_grpo() -> None:
    run = {"gamma": 0.5, "lam": 0.25, "constant_length": 10}
    rows = {name: with_constants(row, run) for name, row in ALGORITHMS.items()}
    mask = torch.ones(1, 2, dtype=torch.bool)
    # V = 0, r = [0, 1]: A = [gamma * lam, 1] = [0.125, 1].
    episodes = strategies.episodes([1.0], mask=mask, token_rewards=torch.tensor([[0.0, 1.0]], dtype=torch.float64))
    assert rows["ppo"].advantage(episodes).tolist() == [[0.125, 1.0]]
    assert rows["dr_grpo"].weighting(mask, strategies.one_each(mask)).tolist() == [pytest.approx([0.1, 0.1])]


def test_without_a_run_the_table_has_the_usual_constants() -> None:
    assert ALGORITHMS["ppo"].advantage.keywords == {"gamma": 1.0, "lam": 0.95}  # type: ignore[attr-defined]
    assert ALGORITHMS["dr_grpo"].weighting.keywords == {"constant_length": 1024}  # type: ignore[attr-defined]


def test_a_run_may_give_policy_and_critic_lambdas_of_their_own() -> None:
    mask = torch.ones(1, 2, dtype=torch.bool)
    episodes = strategies.episodes([1.0], mask=mask, token_rewards=torch.tensor([[0.0, 1.0]], dtype=torch.float64))

    def first(**constants: float) -> tuple[float, float]:
        """The advantage of the first token, for the policy and for the critic."""
        row = with_constants(ALGORITHMS["ppo"], constants)
        assert row.value_advantage is not None
        return float(row.advantage(episodes)[0, 0]), float(row.value_advantage(episodes)[0, 0])

    # V = 0, r = [0, 1]: the first advantage is gamma * lam.
    assert first(lam=0.5) == (0.5, 0.5)
    assert first(lam=0.5, lam_value=1.0) == (0.5, 1.0)
    assert first(lam=0.5, lam_value=0.0) == (0.5, 0.0)
    assert first(lam=0.5, lam_alpha=2.0) == (0.75, 0.5)  # 1 - 1 / (2 * 2)


def test_ppos_lambda_depends_on_the_length_where_it_is_asked_to_and_not_by_default() -> None:
    mask = torch.arange(5) < torch.tensor([[5], [2]])
    rewards = torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0], [0.0, -1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    episodes = strategies.episodes([1.0, -1.0], mask=mask, token_rewards=rewards)
    plain = gae(episodes, gamma=1.0, lam=0.95)
    adaptive = length_adaptive_gae(episodes, gamma=1.0, alpha=0.5)
    assert not torch.equal(plain, adaptive)
    assert torch.equal(ALGORITHMS["ppo"].advantage(episodes), plain)
    assert torch.equal(with_constants(ALGORITHMS["ppo"], {"lam_alpha": 0.5}).advantage(episodes), adaptive)
