"""Our learner against TRL's GRPO trainer on the same tiny model, completions and advantages: loss and gradient.

The whole path is compared: TRL pads and runs each prompt with each completion, ours packs and shares the prompt.
Both run in float32; the bound is 1e-5 of the gradient's norm.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from rlcore.algorithms import table
from rlcore.algorithms.advantages import STD_EPSILON, group_centered, group_normalized
from rlcore.algorithms.surrogates import cispo, ppo_clip, sequence_ratio
from rlcore.algorithms.table import ALGORITHMS, Algorithm
from rlcore.config import KlConfig
from rlcore.models.policy import score_sequences
from rlcore.text.packing import TokenSequence
from rlcore.training.learner import Learner
from rlcore.types import TrainingSample
from tests import strategies
from tests.learners import assert_same, update_config
from tests.peers.trl_trainers import EOS, make_trainer, padded_inputs, tiny_model

pytestmark = pytest.mark.peers

BOUND = 1e-5
MAX_LENGTH = 64
GRPO = ALGORITHMS["grpo"]
#: TRL's settings, and the row of ours that computes the same
ROWS: dict[str, tuple[dict[str, Any], Algorithm]] = {
    "grpo": ({"loss_type": "grpo", "epsilon": 0.2}, GRPO),
    "dr_grpo": (
        {"loss_type": "dr_grpo", "epsilon": 0.2, "max_completion_length": MAX_LENGTH},
        replace(GRPO, weighting=partial(table.constant, constant_length=MAX_LENGTH)),
    ),
    "dapo": ({"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28}, ALGORITHMS["dapo"]),
    "bnpo": ({"loss_type": "bnpo", "epsilon": 0.2}, replace(GRPO, weighting=table.token_mean)),
    # TRL's epsilon_high is the bound of the ratio itself here, ours is its distance from 1.
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.2},
        replace(ALGORITHMS["cispo"], surrogate=partial(cispo, clip_low=1.0, clip_high=0.2)),
    ),
    "sapo": (
        {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
        ALGORITHMS["sapo"],
    ),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.04},
        replace(GRPO, ratio=sequence_ratio, surrogate=partial(ppo_clip, clip_low=0.05, clip_high=0.04)),
    ),
}


def samples_of(model: Any, seed: int) -> list[TrainingSample]:
    """Two groups of four; old and reference log-probabilities are the model's own, moved."""
    generator = torch.Generator().manual_seed(seed)
    sequences = [
        TokenSequence(
            prompt_ids=tuple(range(5, 8 + 3 * group)),
            completion_ids=(*torch.randint(2, 200, (int(length),), generator=generator).tolist(), EOS),
        )
        for group in range(2)
        for length in torch.randint(1, 12, (4,), generator=generator)
    ]
    logprobs = score_sequences(model, sequences, tokens_per_microbatch=256)

    def moved(logprob: torch.Tensor, scale: float) -> torch.Tensor:
        return logprob + torch.randn(len(logprob), generator=generator) * scale

    return [
        TrainingSample(
            episode=number,
            group=number,
            prompt_ids=sequence.prompt_ids,
            completion_ids=sequence.completion_ids,
            loss_mask=torch.ones(len(logprob), dtype=torch.bool),
            sampler_logprobs=logprob,
            old_logprobs=moved(logprob, 0.3),
            ref_logprobs=moved(logprob, 0.4),
            advantages=torch.randn(1, generator=generator).expand(len(logprob)).clone(),
            values=torch.zeros(len(logprob)),
            returns=torch.zeros(len(logprob)),
        )
        for number, (sequence, logprob) in enumerate(zip(sequences, logprobs, strict=True))
    ]


def of_ours(
    model: Any, samples: list[TrainingSample], algorithm: Algorithm, *, beta: float, entropy: float
) -> tuple[float, dict[str, torch.Tensor]]:
    """Our loss and gradient by parameter name. Two epochs are asked for, so that old log-probabilities count, and the
    KL limit stops the update after the first."""
    config = strategies.rl_config(
        update=update_config(num_epochs=2, early_stop_kl=1e-9, entropy_coefficient=entropy),
        kl=KlConfig(coefficient=beta, estimator="k3_ratio"),
    )
    learner = Learner(copy.deepcopy(model), None, algorithm=algorithm, config=config)
    gradient: dict[str, torch.Tensor] = {}

    def keep(*_: Any) -> None:
        named = learner.policy.named_parameters()
        gradient.update({name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None})

    learner.optimizer.register_step_pre_hook(keep)
    return learner.update(samples, seed=0).metrics["loss/policy"], gradient


def of_trl(
    model: Any, samples: list[TrainingSample], *, beta: float, **settings: Any
) -> tuple[float, dict[str, torch.Tensor]]:
    trainer = make_trainer(copy.deepcopy(model), [0.0] * len(samples), [[EOS]] * len(samples), **settings)
    sequences = [
        TokenSequence(prompt_ids=sample.prompt_ids, completion_ids=sample.completion_ids) for sample in samples
    ]
    inputs = padded_inputs(
        sequences,
        old_per_token_logps=[sample.old_logprobs for sample in samples],
        ref_per_token_logps=[sample.ref_logprobs for sample in samples],
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    trainer.beta = beta  # set late: as a setting it loads a reference model from the hub, whose numbers are given here
    advantages = torch.stack([sample.advantages[0] for sample in samples])
    loss = trainer.compute_loss(trainer.model, inputs | {"advantages": advantages})
    loss.backward()
    named = trainer.accelerator.unwrap_model(trainer.model).named_parameters()
    return float(loss), {name: parameter.grad for name, parameter in named if parameter.grad is not None}


def assert_agree(algorithm: Algorithm, settings: dict[str, Any], *, beta: float = 0.0, entropy: float = 0.0) -> None:
    for seed in range(3):
        model = tiny_model(seed)
        samples = samples_of(model, seed)
        my_loss, my_gradient = of_ours(model, samples, algorithm, beta=beta, entropy=entropy)
        their_loss, their_gradient = of_trl(model, samples, beta=beta, **settings)
        assert my_loss == pytest.approx(their_loss, rel=1e-6, abs=1e-6)
        assert my_gradient.keys() == their_gradient.keys()
        flat = [torch.cat([side[name].flatten() for name in my_gradient]) for side in (my_gradient, their_gradient)]
        assert_same(*flat, BOUND)


@pytest.mark.parametrize("name", ROWS)
def test_loss_and_gradient_equal_trls(name: str) -> None:
    settings, algorithm = ROWS[name]
    assert_agree(algorithm, settings)


def test_the_kl_term_equals_trls_with_its_bias_correction_on() -> None:
    # On is its default in this version: k3 times the ratio, as ours. Off, it would be plain k3.
    settings, algorithm = ROWS["grpo"]
    assert_agree(algorithm, settings | {"use_bias_correction_kl": True}, beta=0.04)


def test_the_entropy_bonus_equals_trls_under_the_token_mean() -> None:
    # TRL's bonus is a mean over tokens whatever the loss; ours follows the loss's weighting.
    settings, algorithm = ROWS["dapo"]
    assert_agree(algorithm, settings | {"entropy_coef": 0.01}, entropy=0.01)


@pytest.mark.parametrize(("scale", "advantage"), [("group", group_normalized), ("none", group_centered)])
def test_group_advantages_equal_trls(scale: str, advantage: Any) -> None:
    rewards = [1.0, 0.8, 0.4, 0.2]
    trainer = make_trainer(tiny_model(), rewards, [[9, EOS]] * 4, scale_rewards=scale)
    trainer.train()
    mine = advantage(strategies.episodes(rewards))[:, 0]
    if scale == "group":  # TRL: sample std (n - 1) and epsilon 1e-4
        exact = torch.tensor(rewards, dtype=torch.float64)
        mine = mine * (exact.std(correction=0) + STD_EPSILON) / (exact.std() + 1e-4)
    assert_same(mine.float().sort().values, trainer.seen[0]["advantages"].sort().values, 1e-6)  # TRL shuffles


def test_a_completion_that_was_not_scored_leaves_the_baseline_as_in_trl() -> None:
    rewards = [1.0, None, 0.4, 0.2]
    trainer = make_trainer(tiny_model(), rewards, [[9, EOS]] * 4, scale_rewards="none")
    trainer.train()
    as_numbers = [float("nan") if reward is None else reward for reward in rewards]
    ours = group_centered(strategies.episodes(as_numbers))[:, 0]
    assert_same(ours.sort().values, trainer.seen[0]["advantages"].sort().values, 1e-6)
