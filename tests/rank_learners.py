"""Learners that one process has, or several ranks have together: what each case of a law is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from rlcore.algorithms.table import ALGORITHMS
from rlcore.config import CriticConfig, KlConfig, LoraConfig, OptimConfig, RlConfig
from rlcore.hardware.sharded import ONE, Ranks, ShardConfig, attach_ranks, gather_full, shard
from rlcore.models.heads import ScalarHeadModel
from rlcore.models.lora import AdaptedModel, add_lora
from rlcore.models.runtime import enable_gradient_checkpointing
from rlcore.training.checkpoint import CheckpointWriter, load_newest
from rlcore.training.learner import Learner
from rlcore.training.optim import parameters_of
from rlcore.types import TrainingSample
from tests import learners, strategies
from tests.learners import UNCLIPPED, update_config

CPU, DOUBLE = torch.device("cpu"), torch.float64
Held = Literal["full", "offload", "replicate"]
CLIPPED = OptimConfig(max_grad_norm=0.05)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run of two updates; ``critic``: where it stands. ``shape``: of the samples."""

    algorithm: str = "grpo"
    critic: Literal["separate", "shared", "lora"] = "separate"
    rank: int = 0  # of adapters
    tied: bool = True
    recompute: bool = False
    update: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    shape: dict[str, int] = field(default_factory=dict)

    @property
    def config(self) -> RlConfig:
        base = {"num_minibatches": 2, "num_epochs": 2, "tokens_per_microbatch": 32, "optim": UNCLIPPED}
        update = update_config(**(base | {"lora": LoraConfig(rank=self.rank)} | self.update))
        settings = {"update": update, "critic": CriticConfig(architecture=self.critic)} | self.settings
        return strategies.rl_config(self.algorithm, **settings)


CASES = {
    "grpo": Case(),
    "grpo, untied head": Case(tied=False),
    "grpo, clipped": Case(update={"optim": CLIPPED}),
    "grpo, layers computed again": Case(recompute=True),
    "grpo, KL in the loss": Case(settings={"kl": KlConfig(coefficient=0.2, apply_to="loss")}),
    "grpo, entropy": Case(update={"entropy_coefficient": 0.01}),
    "grpo, stopped early": Case(update={"early_stop_kl": 1e-4, "num_epochs": 3, "num_minibatches": 1}),
    "grpo, more ranks than prompts": Case(shape={"num_prompts": 1, "group_size": 2}, update={"num_minibatches": 1}),
    "gspo": Case(algorithm="gspo"),
    "dapo": Case(algorithm="dapo"),
    "ppo": Case(algorithm="ppo"),
    "ppo, penalty": Case(algorithm="ppo_penalty"),
    "ppo, clipped": Case(algorithm="ppo", update={"optim": CLIPPED}),
    "ppo, head": Case(algorithm="ppo", critic="shared"),
    "ppo, head that spares the backbone": Case(
        algorithm="ppo", critic="shared", settings={"critic": CriticConfig(architecture="shared", detach=True)}
    ),
    "ppo, warm-up": Case(algorithm="ppo", settings={"critic": CriticConfig(warmup_iterations=1)}),
    "ppo, warm-up of a head": Case(
        algorithm="ppo", critic="shared", settings={"critic": CriticConfig(architecture="shared", warmup_iterations=1)}
    ),
}
ADAPTERS = {
    "grpo, adapter": Case(rank=2),
    "ppo, adapters": Case(algorithm="ppo", critic="lora", rank=2),
    "ppo, adapter with a head": Case(algorithm="ppo", critic="shared", rank=2),
}


def make_learner(
    case: Case,
    ranks: Ranks = ONE,
    held: Held = "full",
    *,
    dtype: torch.dtype = DOUBLE,
    sharding: ShardConfig | None = None,
) -> Learner:
    """The learner of a case, as it is before any update: the same weights for any number of ranks."""
    policy: Any = strategies.tiny_llama(dtype=dtype, tie_word_embeddings=case.tied)
    if case.recompute:
        enable_gradient_checkpointing(policy)
    if case.rank:
        policy = add_lora(policy, LoraConfig(rank=case.rank), "policy", seed=0)
        scatter(policy, dtype)
    critic = _critic(case, policy, dtype) if ALGORITHMS[case.algorithm].uses_critic else None
    models = [critic] if critic is not None and case.critic == "shared" else [policy, critic]
    for model in (each for each in models if each is not None and (ranks.size * ranks.width > 1 or held == "offload")):
        if held == "replicate":
            attach_ranks(model, ranks)
        else:
            shard(model, ranks, sharding or ShardConfig(offload=held == "offload"), device=CPU)
    return Learner(policy, critic, algorithm=ALGORITHMS[case.algorithm], config=case.config)


def _critic(case: Case, policy: Any, dtype: torch.dtype) -> ScalarHeadModel:
    backbone = policy
    if case.critic == "separate":
        backbone = strategies.tiny_llama(seed=1, dtype=dtype)
    elif case.critic == "lora":
        backbone = add_lora(policy, LoraConfig(rank=case.rank), "critic", seed=1)
        scatter(backbone, dtype)
    critic = ScalarHeadModel.with_random_head(backbone, torch.Generator().manual_seed(2))
    critic.head.to(dtype)
    return critic


def scatter(model: AdaptedModel, dtype: torch.dtype) -> None:
    """An adapter of random numbers in ``dtype``: one that changes nothing has a gradient of zero in a half of it."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=dtype) * 0.1


def weights_of(learner: Learner) -> torch.Tensor:
    """All that learns, whole and flat; a call of all ranks."""
    modules = [learner.policy, *([learner.critic] if learner.critic is not None else [])]
    found = {id(p): p for module in modules for p in module.parameters() if p.requires_grad}
    return torch.cat([gather_full(p.detach()).flatten() for p in found.values()]).clone()


def samples_of(case: Case, number: int) -> list[TrainingSample]:
    return strategies.random_samples(number, **case.shape)


def two_updates(
    case: Case, held: Held = "full", **settings: Any
) -> Callable[[Ranks], tuple[list[dict[str, float]], torch.Tensor]]:
    """Work for ranks: the metrics of two updates, and the weights after them."""

    def work(ranks: Ranks) -> tuple[list[dict[str, float]], torch.Tensor]:
        with strategies.double_precision():
            learner = make_learner(case, ranks, held, **settings)
            metrics = [dict(learner.update(samples_of(case, n), seed=n).metrics) for n in range(2)]
            return metrics, weights_of(learner)

    return work


def gradient(case: Case, held: Held = "full") -> Callable[[Ranks], torch.Tensor]:
    def work(ranks: Ranks) -> torch.Tensor:
        learner = make_learner(case, ranks, held, dtype=torch.float32)
        learner.trial(strategies.random_samples(0, dtype=torch.float32, **case.shape))
        found = [p.grad for each in learner.optimizers for p in parameters_of(each) if p.grad is not None]
        return torch.cat([gather_full(part).flatten() for part in found])

    return work


def assert_equal_runs(found: Sequence[Any], expected: Any, *, bound: float = 1e-9) -> None:
    """Every rank has the metrics and weights that one process has."""
    metrics, weights = expected
    for their_metrics, their_weights in found:
        assert float((their_weights - weights).norm() / weights.norm()) < bound
        for ours, theirs in zip(metrics, their_metrics, strict=True):
            assert ours.keys() == theirs.keys()
            assert all(abs(ours[name] - theirs[name]) <= bound * max(1.0, abs(ours[name])) for name in ours)


def experience_of(case: Case, *, in_reward: bool) -> Callable[[Ranks], list[TrainingSample]]:
    """Work for ranks: samples whose passes the ranks have shared, with a reference and the case's critic."""

    def work(ranks: Ranks) -> list[TrainingSample]:
        with strategies.double_precision():
            learner, reference = make_learner(case, ranks), strategies.tiny_llama(seed=7, dtype=DOUBLE)
            if ranks.size > 1:
                shard(reference.requires_grad_(False), ranks, ShardConfig(), device=CPU)
            policy = strategies.tiny_llama(dtype=DOUBLE)
            groups = strategies.random_groups(policy, 0)
            kl = KlConfig(coefficient=0.1, apply_to="reward" if in_reward else "loss")
            models = (learner.policy, reference, learner.critic)
            settings = {"tokens_per_microbatch": 24, "bootstrap_truncated": True, "kl": kl, "kl_coefficient": 0.1}
            return list(learners.experience_of(groups, learner.algorithm, *models, **settings).samples)

    return work


State = tuple[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor]


def saves(case: Case, root: Path) -> Callable[[Ranks], State]:
    """Work for ranks: an update, its checkpoint, and what :func:`state_of` says then and after one more update."""

    def work(ranks: Ranks) -> State:
        with strategies.double_precision():
            learner, writer = make_learner(case, ranks), CheckpointWriter()
            learner.update(samples_of(case, 0), seed=0)
            writer.save(root, 1, learner, run_state={"identity": {}})
            writer.close()
            return state_of(case, learner)

    return work


def loads(case: Case, root: Path) -> Callable[[Ranks], State]:
    def work(ranks: Ranks) -> State:
        with strategies.double_precision():
            learner = make_learner(case, ranks)
            assert load_newest(root, learner, identity={}) == {"identity": {}}
            return state_of(case, learner)

    return work


def state_of(case: Case, learner: Learner) -> State:
    """Weights, the optimizers' numbers, and the weights after another update; a call of all ranks."""
    weights = weights_of(learner)
    numbers = tuple(
        gather_full(value).clone()
        for optimizer in learner.optimizers
        for parameter in parameters_of(optimizer)
        for _, value in sorted(optimizer.state[parameter].items())
    )
    learner.update(samples_of(case, 1), seed=1)
    return weights, numbers, weights_of(learner)


def assert_equal_states(found: Sequence[State], expected: State) -> None:
    """Compare restored state bit for bit, and values computed from it up to rounding."""
    for weights, numbers, after in found:
        assert torch.equal(weights, expected[0])
        assert all(torch.equal(one, other) for one, other in zip(numbers, expected[1], strict=True))
        assert float((after - expected[2]).norm() / expected[2].norm()) < 1e-9
