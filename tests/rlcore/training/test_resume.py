"""Resuming: the resumed run is the uninterrupted one bit for bit, and lacks nothing that it could do without."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from rlcore.algorithms.kl import KlController
from rlcore.algorithms.table import ALGORITHMS
from rlcore.config import CriticConfig, KlConfig, LoraConfig, OptimConfig, UpdateConfig
from rlcore.models.heads import ScalarHeadModel
from rlcore.models.lora import add_lora
from rlcore.training.checkpoint import load_newest, save_checkpoint
from rlcore.training.experience import build_experience
from rlcore.training.learner import Learner
from rlcore.training.manifest import MANIFEST
from rlcore.training.scoring_models import ScoringModels
from tests import strategies
from tests.learners import weights_of

IDENTITY = {"config": "c1", "data": "d1"}
RUN_STATE = {"identity": IDENTITY, "iteration": 2, "history": [{"reward/mean": 0.1 + 0.2}]}
REFERENCE = strategies.tiny_llama(seed=7)
NAMES = ["grpo", "ppo", "ppo shared", "ppo lora", "ppo 8bit", "ppo_penalty"]
RUNS = pytest.mark.parametrize("name", NAMES)
ADAPTER = LoraConfig(rank=2)


def make_learner(name: str = "grpo") -> Learner:
    """A learner in which everything that has state moves: schedules, momentum, adaptive KL, critic warm-up."""
    # Only matrices of 4,096 numbers or more have moments in 8 bits.
    policy = strategies.tiny_llama(tie_word_embeddings=False, intermediate_size=256 if "8bit" in name else 32)
    kind: Literal["adamw", "adamw_8bit"] = "adamw_8bit" if "8bit" in name else "adamw"
    name, _, placement = name.removesuffix(" 8bit").partition(" ")
    if placement == "lora":
        policy = add_lora(policy, ADAPTER, "policy", seed=0)
    config = strategies.rl_config(
        name,
        num_iterations=6,
        learning_rate=3e-3,
        kl=KlConfig(coefficient=0.1, apply_to="reward", target=1.0, horizon=20),
        critic=CriticConfig(learning_rate=1e-2, warmup_iterations=1, architecture=placement or "separate"),
        update=UpdateConfig(
            num_epochs=2,
            num_minibatches=2,
            optim=OptimConfig(kind=kind, warmup_steps=3, schedule="cosine", weight_decay=0.1),
            lora=ADAPTER if placement == "lora" else LoraConfig(),
        ),
    )
    backbones = {"": copy.deepcopy, "shared": lambda own: own, "lora": lambda own: add_lora(own, ADAPTER, "v", seed=0)}
    critic = ScalarHeadModel.on_backbone(backbones[placement](policy)) if ALGORITHMS[name].uses_critic else None
    return Learner(policy, critic, algorithm=ALGORITHMS[name], config=config)


def train(learner: Learner, first: int, last: int) -> list[dict[str, float]]:
    """Iterations ``first`` to ``last``; the rollouts' log-probabilities come from the policy as it is then."""
    judges = ScoringModels(
        policy=learner.policy,
        reference=REFERENCE,
        critic=learner.critic,
        temperature=1.0,
        tokens_per_microbatch=256,
    )
    history = []
    for iteration in range(first, last + 1):
        experience = build_experience(
            strategies.random_groups(learner.policy, iteration),
            learner.algorithm,
            judges,
            kl=learner.config.kl,
            kl_coefficient=learner.kl.coefficient,
            truncated="score",
            need_old_logprobs=learner.needs_old_logprobs,
        )
        stats = learner.update(experience.samples, seed=iteration)
        learner.observe_kl(experience.mean_kl, len(experience.samples))
        history.append({**stats.metrics, **experience.metrics})
    return history


def outcome(learner: Learner, history: list[dict[str, float]]) -> tuple[bytes, str]:
    """All weights and all metrics, for comparison bit for bit."""
    models = [learner.policy] if learner.critic is None else [learner.policy, learner.critic]
    return torch.cat([weights_of(model) for model in models]).numpy().tobytes(), json.dumps(history, sort_keys=True)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, tuple[bytes, str]]]:
    """For each run: the folder of a checkpoint after two iterations, and the outcome of going on for two more."""
    made = {}
    for name in NAMES:
        root, learner = tmp_path_factory.mktemp(name), make_learner(name)
        train(learner, 1, 2)
        save_checkpoint(root, 2, learner, run_state=RUN_STATE)
        made[name] = root, outcome(learner, train(learner, 3, 4))
    return made


@RUNS
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(name: str, stopped: Any) -> None:
    root, uninterrupted = stopped[name]
    learner = make_learner(name)
    assert load_newest(root, learner, identity=IDENTITY) == RUN_STATE
    assert outcome(learner, train(learner, 3, 4)) == uninterrupted


def run_of(learner: Learner) -> str:
    """The run's name, of the runs with a critic."""
    if learner.config.update.optim.kind == "adamw_8bit":
        return "ppo 8bit"
    return f"ppo {learner.config.critic.architecture}".removesuffix(" separate")


def forget_policy(learner: Learner) -> None:
    """Weights of a fresh policy."""
    learner.policy.load_state_dict(make_learner(run_of(learner)).policy.state_dict())


def forget_critic(learner: Learner) -> None:
    """Weights of a fresh critic."""
    fresh = make_learner(run_of(learner)).value_module
    assert learner.value_module is not None
    assert fresh is not None
    learner.value_module.load_state_dict(fresh.state_dict())


def forget_beta(learner: Learner) -> None:
    """The KL coefficient as configured."""
    kl = learner.config.kl
    learner.kl = KlController(coefficient=kl.coefficient, target=kl.target, horizon=kl.horizon)


def forget_penalty(learner: Learner) -> None:
    """The coefficient of the penalty as in the table."""
    learner.penalty = learner.algorithm.penalty


def forget_version(learner: Learner) -> None:
    """A policy that was never updated."""
    learner.policy_version = 0


FORGETTERS: dict[str, Callable[[Learner], None]] = {
    "policy": forget_policy,
    "critic": forget_critic,
    "optimizer": lambda learner: learner.optimizer.state.clear(),
    "critic optimizer": lambda learner: learner.critic_optimizer.state.clear(),
    "KL coefficient": forget_beta,
    "penalty": forget_penalty,
    "policy version": forget_version,
}


def restored_items(name: str) -> list[str]:
    """A head on the policy's backbone is in the policy's optimizer. The run with a penalty differs by it alone."""
    if name == "ppo_penalty":
        return ["penalty"]
    others = [item for item in sorted(FORGETTERS) if item != "penalty"]
    return [item for item in others if not (name == "ppo shared" and item.startswith("critic "))]


@pytest.mark.parametrize(("name", "item"), [(name, item) for name in NAMES[1:] for item in restored_items(name)])
def test_without_any_one_of_the_restored_items_the_resumed_run_differs(name: str, item: str, stopped: Any) -> None:
    root, uninterrupted = stopped[name]
    learner = make_learner(name)
    load_newest(root, learner, identity=IDENTITY)
    FORGETTERS[item](learner)
    assert outcome(learner, train(learner, 3, 4)) != uninterrupted


@RUNS
def test_a_checkpoint_comes_back_bit_for_bit(name: str, stopped: Any, tmp_path: Path) -> None:
    root, _ = stopped[name]
    learner = make_learner(name)
    load_newest(root, learner, identity=IDENTITY)
    again = save_checkpoint(tmp_path, 2, learner, run_state=RUN_STATE)
    first = json.loads((root / "step-000002" / MANIFEST).read_text(encoding="utf-8"))
    assert json.loads((again / MANIFEST).read_text(encoding="utf-8")) == first
    assert {path.suffix for path in again.iterdir()} == {".json", ".safetensors"}
