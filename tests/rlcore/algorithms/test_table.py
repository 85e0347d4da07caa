"""Every row of the table: gradient on policy, masks, and the constants that a run may set."""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import Any

import pytest
import torch

from rlcore.algorithms.advantages import SCALES
from rlcore.algorithms.kl import PenaltyController
from rlcore.algorithms.objective import Coefficients, LossInputs, LossOutput, policy_loss
from rlcore.algorithms.table import (
    ALGORITHMS,
    WEIGHTINGS,
    Algorithm,
    constants_of,
    resolve_algorithm,
    with_constants,
    with_objective,
)
from rlcore.config import KlConfig, ObjectiveConfig, RolloutCorrectionConfig, UpdateConfig
from rlcore.errors import ConfigError
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
    return torch.autograd.grad(loss, step.logits, retain_graph=True)[0]


def loss_under(name: str, inputs: LossInputs, coefficients: Coefficients = COEFFICIENTS) -> LossOutput:
    return policy_loss(inputs, ALGORITHMS[name], coefficients)


@EVERY_ROW
def test_the_on_policy_gradient_is_the_plain_policy_gradient(name: str) -> None:
    step = make_step(name, on_policy=True)
    inputs = step.inputs
    plain = -(inputs.weights * inputs.advantages * inputs.policy_logprobs)[inputs.loss_mask].sum()
    ours = gradient(loss_under(name, inputs, SURROGATE_ALONE).loss, step)
    assert float(ours.norm()) > 1e-5  # Dr. GRPO divides by 1,024
    torch.testing.assert_close(ours, gradient(plain, step), rtol=1e-9, atol=1e-12)


@EVERY_ROW
def test_on_the_first_pass_the_ratio_is_one_and_nothing_is_clipped(name: str) -> None:
    output = loss_under(name, make_step(name, on_policy=True).inputs)
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
    dirty = loss_under(name, dataclasses.replace(step.inputs, **filled))
    clean = loss_under(name, step.inputs)
    assert torch.equal(gradient(dirty.loss, step), gradient(clean.loss, step))
    assert torch.equal(dirty.loss, clean.loss)
    assert {**dirty.sums, **dirty.maxima} == {**clean.sums, **clean.maxima}


@EVERY_ROW
def test_uses_critic_iff_advantages_read_values(name: str) -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    with_critic, without = (
        ALGORITHMS[name].advantage(strategies.episodes([1.0, 0.0], group=[0, 0], mask=mask, values=values))
        for values in (torch.rand(2, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(2, 3))
    )
    assert ALGORITHMS[name].uses_critic == (not torch.equal(with_critic, without))


PAPERS = {
    "gspo": (3e-4, 4e-4), "dapo": (0.2, 0.28), "cispo": (1.0, 0.28), "dppo_tv": (0.15, 0.15),
    **dict.fromkeys(("ppo", "grpo", "dr_grpo", "rloo", "reinforce++", "maxrl"), (0.2, 0.2)),
}  # fmt: skip


def test_a_row_of_a_paper_has_the_papers_bounds_and_gates() -> None:
    for name, bounds in PAPERS.items():
        keywords = ALGORITHMS[name].surrogate.keywords  # type: ignore[attr-defined]
        assert (keywords["clip_low"], keywords["clip_high"]) == bounds, name
    gates = {"gate_positive": 1.0, "gate_negative": 1.05}
    assert ALGORITHMS["sapo"].surrogate.keywords == gates  # type: ignore[attr-defined]


def test_a_run_sets_the_constants_of_gae_and_of_dr_grpo() -> None:
    loss_under = {"gamma": 0.5, "lam": 0.25, "constant_length": 10}
    rows = {name: with_constants(row, loss_under) for name, row in ALGORITHMS.items()}
    mask = torch.ones(1, 2, dtype=torch.bool)
    # V = 0, r = [0, 1]: A = [gamma * lam, 1] = [0.125, 1].
    episodes = strategies.episodes([1.0], mask=mask, token_rewards=torch.tensor([[0.0, 1.0]], dtype=torch.float64))
    assert rows["ppo"].advantage(episodes).tolist() == [[0.125, 1.0]]
    assert rows["dr_grpo"].weighting(mask, strategies.one_each(mask)).tolist() == [pytest.approx([0.1, 0.1])]
    assert ALGORITHMS["dr_grpo"].weighting(mask, strategies.one_each(mask)).tolist() == [[1 / 1024] * 2]  # unless set


def test_a_run_may_give_policy_and_critic_lambdas_of_their_own() -> None:
    mask = torch.ones(1, 2, dtype=torch.bool)
    episodes = strategies.episodes([1.0], mask=mask, token_rewards=torch.tensor([[0.0, 1.0]], dtype=torch.float64))

    def first(**constants: float) -> tuple[float, float]:
        """The advantage of the first token, for the policy and for the critic."""
        algorithm = with_constants(ALGORITHMS["ppo"], constants)
        assert algorithm.value_advantage is not None
        return float(algorithm.advantage(episodes)[0, 0]), float(algorithm.value_advantage(episodes)[0, 0])

    # V = 0, r = [0, 1]: the first advantage is gamma * lam.
    assert first(lam=0.5) == (0.5, 0.5)
    assert first(lam=0.5, lam_value=1.0) == (0.5, 1.0)
    assert first(lam=0.5, lam_value=0.0) == (0.5, 0.0)
    assert first(lam=0.5, lam_alpha=2.0) == (0.75, 0.5)  # 1 - 1 / (2 * 2)


VALUES: dict[str, Any] = {
    "scale": "batch",
    "clip_low": 0.1,
    "clip_high": 0.3,
    "dual_clip": 3.0,
    "gate_positive": 2.0,
    "gate_negative": 2.0,
    "penalty_coefficient": 3.0,
    "penalty_target": 0.1,
    "constant_length": 7,
}


def row(name: str, **settings: Any) -> Algorithm:
    run = {"constant_length": 8}
    return with_objective(ALGORITHMS[name], ObjectiveConfig(**settings), name=name, run=run)


def computed(algorithm: Algorithm) -> list[Any]:
    log_ratio = torch.linspace(-3.0, 3.0, 241, dtype=torch.float64).repeat(2)
    advantages = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat_interleave(241)
    logprobs = torch.full((482,), 0.3, dtype=torch.float64).log()
    episodes = strategies.episodes([1.0, 0.0, 3.0, 1.0], group=[0, 0, 1, 1])
    return [
        algorithm.advantage(episodes).flatten().tolist(),
        algorithm.surrogate(log_ratio, logprobs, advantages).loss.tolist(),
        algorithm.weighting(torch.ones(2, 3, dtype=torch.bool), torch.arange(2)).flatten().tolist(),
        algorithm.penalty,
    ]


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("ppo", {"gamma", "lam", "lam_alpha", "lam_value", "clip_low", "clip_high", "dual_clip"}),
        ("ppo_penalty", {"gamma", "lam", "lam_alpha", "lam_value", "penalty_coefficient", "penalty_target"}),
        ("grpo", {"scale", "clip_low", "clip_high", "dual_clip"}),
        ("dr_grpo", {"scale", "clip_low", "clip_high", "dual_clip", "constant_length"}),
        ("cispo", {"scale", "clip_low", "clip_high"}),
        ("rloo", {"clip_low", "clip_high"}),
        ("sapo", {"scale", "gate_positive", "gate_negative"}),
    ],
)
def test_a_row_has_the_constants_of_its_functions(name: str, known: set[str]) -> None:
    assert constants_of(ALGORITHMS[name]) == known


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
@pytest.mark.parametrize("setting", sorted(VALUES))
def test_a_setting_changes_what_its_row_computes_or_is_refused(name: str, setting: str) -> None:
    if setting in constants_of(ALGORITHMS[name]):
        assert computed(row(name, **{setting: VALUES[setting]})) != computed(row(name))
        return
    with pytest.raises(ConfigError, match=rf"{name.replace('+', '.')} does not use {setting}") as caught:
        row(name, **{setting: VALUES[setting]})
    assert caught.value.where == f"update.objective.{setting}"
    known = ", ".join(each for each in VALUES if each in constants_of(ALGORITHMS[name]))
    assert caught.value.fix == f"it uses: {known or 'no constant'}"


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_row_without_settings_is_unchanged(name: str) -> None:
    assert with_objective(ALGORITHMS[name], ObjectiveConfig(), name=name) == ALGORITHMS[name]


def test_the_penalty_has_the_papers_start_and_a_run_sets_both_numbers() -> None:
    assert ALGORITHMS["ppo_penalty"].penalty == PenaltyController(coefficient=1.0, target=0.01)
    changed = row("ppo_penalty", penalty_coefficient=3.0, penalty_target=0.05)
    assert changed.penalty == PenaltyController(coefficient=3.0, target=0.05)


@pytest.mark.parametrize(("epochs", "minibatches", "prompts"), [(1, 1, 8), (1, 4, 1)])
def test_a_penalty_without_a_second_step_is_refused(epochs: int, minibatches: int, prompts: int) -> None:
    def resolved(**update: int) -> Algorithm:
        config = UpdateConfig(**({"num_epochs": epochs, "num_minibatches": minibatches} | update))
        return resolve_algorithm(strategies.rl_config("ppo_penalty", update=config, prompts_per_iteration=prompts))

    with pytest.raises(ConfigError, match=r"ppo_penalty needs several optimizer steps per iteration") as caught:
        resolved()
    assert caught.value.where == "update.num_minibatches"
    assert "num_epochs to 2" in caught.value.fix
    assert resolved(num_epochs=2).penalty


@pytest.mark.parametrize(
    ("name", "settings", "first"),
    [
        # 4 tokens; 2 sequences of 3 and 1; 2 sequences over a length of 8 (max_new_tokens), or of 5.
        ("ppo", {"weighting": "token_mean"}, 1 / 4),
        ("ppo", {"weighting": "sequence_mean"}, 1 / 6),
        ("ppo", {"weighting": "constant"}, 1 / 16),
        ("ppo", {"weighting": "constant", "constant_length": 5}, 1 / 10),
        ("dr_grpo", {}, 1 / 16),
        ("dr_grpo", {"weighting": "token_mean"}, 1 / 4),
    ],
)
def test_a_weighting_is_chosen_by_name(name: str, settings: dict[str, Any], first: float) -> None:
    mask = torch.tensor([[True, True, True, False], [True, False, False, False]])
    assert float(row(name, **settings).weighting(mask, strategies.one_each(mask))[0, 0]) == pytest.approx(first)


def test_a_constant_length_without_the_constant_weighting_is_refused() -> None:
    with pytest.raises(ConfigError, match="constant_length"):
        row("dr_grpo", weighting="token_mean", constant_length=5)


def test_the_configuration_names_every_scale_and_weighting_and_no_other() -> None:
    hints = typing.get_type_hints(ObjectiveConfig)

    def choices(name: str) -> list[str]:
        return sorted(typing.get_args(typing.get_args(hints[name])[0]))

    assert choices("scale") == sorted(SCALES)
    assert choices("weighting") == sorted(WEIGHTINGS)
    assert {*hints} == {*VALUES, "weighting"}
    assert {*hints} - {"weighting"} <= {name for each in ALGORITHMS.values() for name in constants_of(each)}


@pytest.mark.parametrize("value", [0.5, 1.0])
def test_a_dual_clip_within_the_clip_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="dual_clip"):
        ObjectiveConfig(dual_clip=value)


@pytest.mark.parametrize("kl", [KlConfig(), KlConfig(coefficient=1.0), KlConfig(apply_to="reward")])
def test_distillation_needs_kl_in_the_reward(kl: KlConfig) -> None:
    with pytest.raises(ConfigError, match="distil trains on per-token rewards") as caught:
        resolve_algorithm(strategies.rl_config("distil", kl=kl, group_size=1))
    assert caught.value.where == "kl.apply_to"
    taught = KlConfig(coefficient=1.0, apply_to="reward")
    assert resolve_algorithm(strategies.rl_config("distil", kl=taught, group_size=1))
