"""Learners over a tiny policy, for tests: what they see as gradient, and true samples of their policy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import LlamaForCausalLM

from rlcore.algorithms.table import ALGORITHMS, Algorithm
from rlcore.config import (
    CriticConfig,
    KlConfig,
    OptimConfig,
    RewardModelConfig,
    RolloutCorrectionConfig,
    UpdateConfig,
)
from rlcore.models.heads import ScalarHeadModel
from rlcore.training.checkpoint import capture_state, write_checkpoint
from rlcore.training.experience import Experience, build_experience
from rlcore.training.learner import Learner
from rlcore.training.optim import Report, parameters_of
from rlcore.training.preferences import TokenPair, preference_sets, shuffled_sets
from rlcore.training.reward_model import RewardLearner
from rlcore.training.scoring_models import ScoringModels
from rlcore.types import ScoredRollout, TrainingSample
from tests import strategies

UNCLIPPED = OptimConfig(max_grad_norm=1e9, beta1=0.9, beta2=0.95)
NO_CORRECTION = RolloutCorrectionConfig(mode="off")


def update_config(**settings: Any) -> UpdateConfig:
    """One step, no gradient clipping, no mismatch correction, unless said otherwise."""
    return UpdateConfig(**({"optim": UNCLIPPED, "rollout_correction": NO_CORRECTION} | settings))


def make_learner(name: str = "grpo", *, dtype: torch.dtype = torch.float64, **settings: Any) -> Learner:
    """A learner of a tiny policy; PPO gets a critic whose head is not zero, so that its backbone learns too."""
    policy, critic = strategies.tiny_llama(dtype=dtype), None
    if ALGORITHMS[name].uses_critic:
        backbone = strategies.tiny_llama(seed=1, dtype=dtype)
        critic = ScalarHeadModel.with_random_head(backbone, torch.Generator().manual_seed(2)).to(dtype)
    config = strategies.rl_config(name, **({"update": update_config()} | settings))
    return Learner(policy, critic, algorithm=ALGORITHMS[name], config=config)


def shared_learner(*, dtype: torch.dtype = torch.float64, **settings: Any) -> Learner:
    """PPO with the critic's head on the policy's backbone; the head is not zero, so that the backbone feels it."""
    policy = strategies.tiny_llama(dtype=dtype)
    critic = ScalarHeadModel.on_backbone(policy)
    with torch.no_grad():
        critic.head.weight.copy_(torch.randn(1, 24, generator=torch.Generator().manual_seed(0)) * 0.2)
    critic.head.to(dtype)
    settings = {"critic": CriticConfig(architecture="shared")} | settings
    config = strategies.rl_config("ppo", **({"update": update_config()} | settings))
    return Learner(policy, critic, algorithm=ALGORITHMS["ppo"], config=config)


def train_reward_model(
    model: ScalarHeadModel, pairs: Sequence[TokenPair], config: RewardModelConfig, *, seed: int, report: Report
) -> None:
    model.train_last_layers(config.backbone.trainable_layers)
    sizes = {"num_epochs": config.num_epochs, "batch_size": config.batch_size}
    batches = shuffled_sets(preference_sets(pairs), **sizes, seed=seed, name="reward_model")
    learner = RewardLearner([model], config)
    learner.begin(0, num_steps=len(batches))
    for number, sets in enumerate(batches, start=1):
        report(number, learner.step(sets))


def save_checkpoint(root: Path, step: int, learner: Learner, *, run_state: Mapping[str, Any], **kept: Any) -> Path:
    return write_checkpoint(root, step, capture_state(learner, run_state=run_state), **kept)


def weights_of(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).clone()


def gradients_of(learner: Learner, samples: Sequence[TrainingSample], *, step: int = 0) -> torch.Tensor:
    """The gradient that an optimizer step of an update sees, of the policy and then the critic, flat."""
    seen: dict[int, list[torch.Tensor]] = {}

    def remember(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        seen.setdefault(id(optimizer), []).append(torch.cat([p.grad.flatten() for p in parameters]))

    optimizers = [learner.optimizer] if learner.critic is None else [learner.optimizer, learner.critic_optimizer]
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(remember)
    learner.update(samples, seed=0)
    return torch.cat([seen[id(optimizer)][step] for optimizer in optimizers])


@contextmanager
def recorded_gradients() -> Iterator[list[torch.Tensor]]:
    """The gradients of all optimizer steps within the context, flat, in the order of the optimizer's groups."""
    found: list[torch.Tensor] = []

    def record(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        found.append(torch.cat([p.grad.flatten() for p in parameters_of(optimizer) if p.grad is not None]))

    hook = register_optimizer_step_pre_hook(record)
    yield found
    hook.remove()


def gradient_of_loops(*losses: tuple[torch.Tensor, torch.nn.Module]) -> torch.Tensor:
    """Return the gradient of each loss by its model, flat, in the optimizers' order: matrices before vectors."""
    parts = []
    for loss, module in losses:
        learning = sorted(module.parameters(), key=lambda parameter: parameter.ndim < 2)
        parts += [gradient.flatten() for gradient in torch.autograd.grad(loss, learning, retain_graph=True)]
    return torch.cat(parts)


def _with_advantages(
    samples: Sequence[TrainingSample], change: Callable[[torch.Tensor], torch.Tensor], prompts: Collection[object]
) -> list[TrainingSample]:
    chosen = [not prompts or sample.prompt_ids in prompts for sample in samples]
    return [
        replace(sample, advantages=change(sample.advantages)) if is_chosen else sample
        for sample, is_chosen in zip(samples, chosen, strict=True)
    ]


def silenced(samples: Sequence[TrainingSample], *prompts: tuple[int, ...]) -> list[TrainingSample]:
    """Samples without advantage, all or those of some prompts."""
    return _with_advantages(samples, torch.zeros_like, prompts)


def overflowing(samples: Sequence[TrainingSample], *prompts: tuple[int, ...]) -> list[TrainingSample]:
    """Samples whose gradient leaves the numbers of float32, all or those of some prompts."""
    return _with_advantages(samples, lambda advantages: advantages.sign() * 1e30, prompts)


def on_policy_samples(policy: LlamaForCausalLM, seed: int = 0, **shape: int) -> list[TrainingSample]:
    """GRPO samples with true old log-probabilities, float32."""
    return list(experience_of(strategies.random_groups(policy, seed, **shape), ALGORITHMS["grpo"], policy).samples)


def experience_of(
    groups: Sequence[Sequence[ScoredRollout]],
    algorithm: Algorithm,
    policy: Any,
    reference: Any = None,
    critic: ScalarHeadModel | None = None,
    **settings: Any,
) -> Experience:
    """Experience with old log-probabilities and without KL, unless said otherwise."""
    models: dict[str, Any] = {"temperature": 1.0, "tokens_per_microbatch": 64, "bootstrap_truncated": False}
    build: dict[str, Any] = {"kl": KlConfig(), "kl_coefficient": 0.0, "truncated": "score", "need_old_logprobs": True}
    models |= {name: settings.pop(name) for name in models if name in settings}
    judges = ScoringModels(policy=policy, reference=reference, critic=critic, **models)
    return build_experience(groups, algorithm, judges, **(build | settings))


def assert_same(ours: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    assert float(expected.norm()) > 0.0
    assert float((ours - expected).norm() / expected.norm()) < bound
