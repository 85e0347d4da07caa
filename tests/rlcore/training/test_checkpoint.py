"""Checkpoints: a resumed run is the uninterrupted one bit for bit; damage, other runs and a full disk are survived."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.algorithms.kl import KlController
from rlcore.algorithms.table import ALGORITHMS
from rlcore.config import CriticConfig, KlConfig, OptimConfig, UpdateConfig
from rlcore.errors import CheckpointError, StorageError
from rlcore.models.heads import ScalarModel
from rlcore.training.checkpoint import MANIFEST, is_intact, load_newest, save_checkpoint
from rlcore.training.experience import Judges, build_experience
from rlcore.training.learner import Learner
from tests import strategies
from tests.learners import weights_of

IDENTITY = {"config": "c1", "data": "d1"}
RUN_STATE = {"identity": IDENTITY, "iteration": 2, "history": [{"reward/mean": 0.1 + 0.2}]}
REFERENCE = strategies.tiny_llama(seed=7)
RUNS = pytest.mark.parametrize("name", ["grpo", "ppo"])


def make_learner(name: str = "grpo") -> Learner:
    """A learner in which everything that has state moves: schedules, momentum, adaptive KL, critic warm-up."""
    policy = strategies.tiny_llama(tie_word_embeddings=False)
    config = strategies.rl_config(
        name,
        num_iterations=6,
        learning_rate=3e-3,
        kl=KlConfig(coefficient=0.1, placement="reward", target=1.0, horizon=20),
        critic=CriticConfig(learning_rate=1e-2, warmup_iterations=1),
        update=UpdateConfig(
            epochs=2, minibatches=2, optim=OptimConfig(warmup_steps=3, schedule="cosine", weight_decay=0.1)
        ),
    )
    critic = ScalarModel.with_zero_head(policy) if ALGORITHMS[name].uses_critic else None
    return Learner(policy, critic, algorithm=ALGORITHMS[name], config=config)


def train(learner: Learner, first: int, last: int) -> list[dict[str, float]]:
    """Iterations ``first`` to ``last``; the rollouts' log-probabilities come from the policy as it is then."""
    judges = Judges(
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
    for name in ("grpo", "ppo"):
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


def forget_policy(learner: Learner) -> None:
    """Weights of a fresh policy."""
    learner.policy.load_state_dict(make_learner().policy.state_dict())


def forget_critic(learner: Learner) -> None:
    """Weights of a fresh critic."""
    fresh = make_learner("ppo").critic
    assert learner.critic is not None
    assert fresh is not None
    learner.critic.load_state_dict(fresh.state_dict())


def forget_schedule(scheduler: torch.optim.lr_scheduler.LambdaLR) -> None:
    """A schedule at its first step."""
    scheduler.last_epoch = 0
    for group, base, factor in zip(
        scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
    ):
        group["lr"] = base * factor(0)


def forget_beta(learner: Learner) -> None:
    """The KL coefficient as configured."""
    kl = learner.config.kl
    learner.kl = KlController(coefficient=kl.coefficient, target=kl.target, horizon=kl.horizon)


def forget_version(learner: Learner) -> None:
    """A policy that was never updated."""
    learner.policy_version = 0


FORGETTERS: dict[str, Callable[[Learner], None]] = {
    "policy": forget_policy,
    "critic": forget_critic,
    "optimizer": lambda learner: learner.optimizer.state.clear(),
    "critic optimizer": lambda learner: learner.critic_optimizer.state.clear(),
    "schedule": lambda learner: forget_schedule(learner.scheduler),
    "critic schedule": lambda learner: forget_schedule(learner.critic_scheduler),
    "KL coefficient": forget_beta,
    "policy version": forget_version,
}


@pytest.mark.parametrize("item", sorted(FORGETTERS))
def test_without_any_one_of_the_restored_items_the_resumed_run_differs(item: str, stopped: Any) -> None:
    root, uninterrupted = stopped["ppo"]
    learner = make_learner("ppo")
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


def test_a_learner_that_has_not_moved_yet_can_be_saved(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 0, make_learner("ppo"), run_state={"identity": {}})
    learner = make_learner("ppo")
    assert load_newest(tmp_path, learner, identity={}) == {"identity": {}}
    assert learner.optimizer.state_dict()["state"] == {}


def test_without_a_checkpoint_there_is_nothing_to_load(tmp_path: Path) -> None:
    assert load_newest(tmp_path / "nowhere", make_learner(), identity={}) is None
    assert load_newest(tmp_path, make_learner(), identity={}) is None


def save_steps(root: Path, *steps: int, keep: int = 9) -> Learner:
    """Checkpoints of one learner under several steps; the run state tells them apart."""
    learner = make_learner()
    for step in steps:
        save_checkpoint(root, step, learner, run_state={"identity": IDENTITY, "iteration": step}, keep=keep)
    return learner


def names(root: Path) -> list[str]:
    """What lies in a folder."""
    return sorted(path.name for path in root.iterdir())


def flip_a_bit(folder: Path) -> None:
    """Change the last byte of the weights, leaving the size as it is."""
    path = folder / "policy.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a flipped bit": flip_a_bit,
    "a truncated file": lambda folder: (folder / "optimizer.safetensors").write_bytes(b"short"),
    "a missing file": lambda folder: (folder / "policy.safetensors").unlink(),
    "a missing manifest": lambda folder: (folder / MANIFEST).unlink(),
    "an empty manifest": lambda folder: (folder / MANIFEST).write_text("{}", encoding="utf-8"),
    "a manifest that is a list": lambda folder: (folder / MANIFEST).write_text("[1]", encoding="utf-8"),
    "a half-written manifest": lambda folder: (folder / MANIFEST).write_text('{"policy', encoding="utf-8"),
}


@pytest.mark.parametrize("damage", sorted(DAMAGES))
def test_a_damaged_newest_checkpoint_is_renamed_aside_and_the_older_one_loaded(damage: str, tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    DAMAGES[damage](tmp_path / "step-000002")
    state = load_newest(tmp_path, make_learner(), identity=IDENTITY)
    assert state is not None
    assert state["iteration"] == 1
    assert names(tmp_path) == ["damaged-step-000002", "step-000001"]


def test_the_same_step_may_be_damaged_twice(tmp_path: Path) -> None:
    for _ in range(2):
        save_steps(tmp_path, 1, 2)
        flip_a_bit(tmp_path / "step-000002")
        load_newest(tmp_path, make_learner(), identity=IDENTITY)
    assert names(tmp_path) == ["damaged-step-000002", "damaged-step-000002.1", "step-000001"]


def test_when_every_checkpoint_is_damaged_the_run_does_not_begin_anew_in_silence(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    for step in (1, 2):
        flip_a_bit(tmp_path / f"step-{step:06d}")
    with pytest.raises(CheckpointError, match="all 2 checkpoints were damaged"):
        load_newest(tmp_path, make_learner(), identity=IDENTITY)
    assert names(tmp_path) == ["damaged-step-000001", "damaged-step-000002"]


def test_a_half_written_checkpoint_is_never_chosen_and_swept_by_the_next_save(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    half = tmp_path / ".tmp-2"
    half.mkdir()
    (half / "policy.safetensors").write_bytes(b"half")
    state = load_newest(tmp_path, make_learner(), identity=IDENTITY)
    assert state is not None
    assert state["iteration"] == 1
    assert half.exists()
    save_steps(tmp_path, 3)
    assert names(tmp_path) == ["step-000001", "step-000003"]


@pytest.mark.parametrize(
    ("identity", "named"),
    [
        ({"config": "c2", "data": "d1"}, "config"),
        ({"config": "c2", "data": "d2"}, "config, data"),
        ({"config": "c1"}, "data"),
        ({**IDENTITY, "code": "x"}, "code"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_by_name(identity: dict[str, str], named: str, tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    learner = make_learner()
    forget = weights_of(learner.policy)
    with torch.no_grad():
        learner.policy.lm_head.weight.zero_()
    with pytest.raises(CheckpointError, match=f"made with another {named}\n"):
        load_newest(tmp_path, learner, identity=identity)
    assert not bool(learner.policy.lm_head.weight.any())  # untouched: the checkpoint was not loaded
    assert not torch.equal(weights_of(learner.policy), forget)
    assert names(tmp_path) == ["step-000001"]


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    config = strategies.rl_config()
    other = Learner(strategies.tiny_llama(num_hidden_layers=1), None, algorithm=ALGORITHMS["grpo"], config=config)
    with pytest.raises(CheckpointError, match="other parameters than the model"):
        load_newest(tmp_path, other, identity=IDENTITY)


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """The kernel refuses to let any file grow beyond a size, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# The first limit stops the weights inside safetensors; the second lets the learner pass and stops the run's state.
@pytest.mark.parametrize(("limit", "history"), [(10_000, 1), (200_000, 300_000)])
def test_a_full_disk_is_a_storage_error_and_the_earlier_checkpoint_stays(
    limit: int, history: int, tmp_path: Path
) -> None:
    learner = save_steps(tmp_path, 1)
    with files_of_at_most(limit), pytest.raises(StorageError, match="step 2 could not be written") as caught:
        save_checkpoint(tmp_path, 2, learner, run_state={"identity": IDENTITY, "history": "x" * history})
    assert caught.value.where == str(tmp_path)
    assert "free space" in caught.value.fix
    assert names(tmp_path) == ["step-000001"]
    assert is_intact(tmp_path / "step-000001")


def test_old_checkpoints_are_pruned_by_number_not_by_name(tmp_path: Path) -> None:
    save_steps(tmp_path, 999_998, 999_999, 1_000_000, keep=2)
    assert names(tmp_path) == ["step-1000000", "step-999999"]
    state = load_newest(tmp_path, make_learner(), identity=IDENTITY)
    assert state is not None
    assert state["iteration"] == 1_000_000


def test_the_same_step_can_be_saved_again(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 1)
    assert is_intact(tmp_path / "step-000001")
