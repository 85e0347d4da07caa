"""Constants of a row that a run sets otherwise: each reaches its function, and one without a meaning is refused."""

from __future__ import annotations

import typing
from typing import Any

import pytest
import torch

from rlcore.algorithms.advantages import SCALES
from rlcore.algorithms.kl import PenaltyController
from rlcore.algorithms.resolve import constants_of, resolve_algorithm, with_objective
from rlcore.algorithms.table import ALGORITHMS, Algorithm
from rlcore.algorithms.weighting import WEIGHTINGS
from rlcore.config import ObjectiveConfig, UpdateConfig
from rlcore.errors import ConfigError
from tests import strategies

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
    """A row of the table with some constants set."""
    run = {"constant_length": 8}
    return with_objective(ALGORITHMS[name], ObjectiveConfig(**settings), name=name, run=run)


def loss_of(algorithm: Algorithm, *, ratio: float, advantage: float) -> float:
    """The surrogate of one token whose probability is now 0.4."""
    logprob = torch.tensor([0.4], dtype=torch.float64).log()
    log_ratio = torch.tensor([ratio], dtype=torch.float64).log()
    return float(algorithm.surrogate(log_ratio, logprob, torch.tensor([advantage], dtype=torch.float64)).loss)


def computed(algorithm: Algorithm) -> list[Any]:
    """Return the results of a row's functions on tokens whose probability has moved either way."""
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
    assert caught.value.fix


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_without_settings_a_row_is_what_it_was(name: str) -> None:
    assert with_objective(ALGORITHMS[name], ObjectiveConfig(), name=name) == ALGORITHMS[name]


def test_the_bounds_of_the_ratio_reach_the_clip() -> None:
    # ratio 1.5, A = 1: min(1.5, 1.3) = 1.3; ratio 0.5, A = -1: -min(-0.5, -0.9) = 0.9; ratio 4, A = -1: at most 3.
    changed = row("grpo", clip_low=0.1, clip_high=0.3, dual_clip=3.0)
    assert loss_of(changed, ratio=1.5, advantage=1.0) == pytest.approx(-1.3)
    assert loss_of(changed, ratio=0.5, advantage=-1.0) == pytest.approx(0.9)
    assert loss_of(changed, ratio=4.0, advantage=-1.0) == pytest.approx(3.0)
    assert loss_of(row("grpo", dual_clip=0.0), ratio=4.0, advantage=-1.0) == pytest.approx(4.0)


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


def test_the_gates_of_sapo_are_settings_of_their_own() -> None:
    # ratio 1.5: tau 2 gives sigmoid(1) * 4 / 2 = 0.731059 * 2 = 1.462117.
    changed = row("sapo", gate_positive=2.0)
    assert loss_of(changed, ratio=1.5, advantage=1.0) == pytest.approx(-1.462117, abs=1e-6)
    assert loss_of(changed, ratio=1.5, advantage=-1.0) == loss_of(ALGORITHMS["sapo"], ratio=1.5, advantage=-1.0)


def test_the_scale_of_a_group_reaches_the_advantages() -> None:
    # Worked by hand where the scales are tested: deviation 0.5 over the batch's std 1.08972, and over nothing.
    episodes = strategies.episodes([1.0, 0.0, 3.0, 1.0], group=[0, 0, 1, 1])
    assert row("grpo", scale="batch").advantage(episodes)[0].tolist() == pytest.approx([0.45883], abs=1e-5)
    assert row("grpo", scale="none").advantage(episodes)[0].tolist() == [0.5]
    assert row("dr_grpo", scale="group").advantage(episodes)[0].tolist() == pytest.approx([1.0], abs=1e-5)


def test_a_weighting_is_chosen_by_name_and_a_constant_one_has_a_length() -> None:
    mask = torch.tensor([[True, True, True, False], [True, False, False, False]])
    # 4 tokens; 2 sequences of 3 and 1; 2 sequences over a length of 8 (max_new_tokens), or of 5.
    assert row("ppo", weighting="token_mean").weighting(mask, strategies.one_each(mask))[0, 0] == 0.25
    assert float(
        row("ppo", weighting="sequence_mean").weighting(mask, strategies.one_each(mask))[0, 0]
    ) == pytest.approx(1 / 6)
    assert row("ppo", weighting="constant").weighting(mask, strategies.one_each(mask))[0, 0] == 0.0625
    assert float(
        row("ppo", weighting="constant", constant_length=5).weighting(mask, strategies.one_each(mask))[0, 0]
    ) == pytest.approx(0.1)
    assert row("dr_grpo").weighting(mask, strategies.one_each(mask))[0, 0] == 0.0625
    assert row("dr_grpo", weighting="token_mean").weighting(mask, strategies.one_each(mask))[0, 0] == 0.25


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


@pytest.mark.parametrize(
    ("name", "setting", "known"),
    [
        ("sapo", "clip_low", "scale, gate_positive, gate_negative"),
        ("cispo", "dual_clip", "scale, clip_low, clip_high"),
        ("ppo", "scale", "clip_low, clip_high, dual_clip"),
    ],
)
def test_the_error_says_which_constants_the_row_has(name: str, setting: str, known: str) -> None:
    with pytest.raises(ConfigError) as caught:
        row(name, **{setting: VALUES[setting]})
    assert caught.value.fix.endswith(f"uses: {known}")
