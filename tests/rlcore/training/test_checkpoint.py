"""Checkpoints: damage, other runs and a full disk are survived, and a resumed run is the uninterrupted one."""

from __future__ import annotations

import copy
import json
import re
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcore.algorithms.table import ALGORITHMS
from rlcore.checks.health import HealthMonitor
from rlcore.config import (
    LIMITS,
    CriticConfig,
    HealthConfig,
    KlConfig,
    LimitConfig,
    LoraConfig,
    OptimConfig,
    UpdateConfig,
)
from rlcore.errors import CheckpointError, StorageError
from rlcore.models.heads import ScalarHeadModel
from rlcore.models.lora import add_lora
from rlcore.training import checkpoint
from rlcore.training.checkpoint import (
    CheckpointWriter,
    capture_state,
    is_intact,
    load_newest,
    steps_to_keep,
    write_checkpoint,
)
from rlcore.training.learner import Learner
from rlcore.training.manifest import MANIFEST, AppendOnlyFile, has_sealed_prefix
from tests import learners, strategies
from tests.learners import save_checkpoint, weights_of

IDENTITY = {"config": "c1", "data": "d1"}
make_learner = partial(learners.make_learner, dtype=torch.float32)


def test_new_learner_can_be_saved(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 0, make_learner("ppo"), run_state={"identity": {}})
    learner = make_learner("ppo")
    assert load_newest(tmp_path, learner, identity={}) == {"identity": {}}
    assert learner.optimizer.state_dict()["state"] == {}


def test_no_checkpoint_loads_nothing(tmp_path: Path) -> None:
    assert load_newest(tmp_path / "nowhere", make_learner(), identity={}) is None
    assert load_newest(tmp_path, make_learner(), identity={}) is None


def save_steps(root: Path, *steps: int, keep: int = 9) -> Learner:
    learner = make_learner()
    for step in steps:
        save_checkpoint(root, step, learner, run_state={"identity": IDENTITY, "iteration": step}, keep=keep)
    return learner


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def flip_a_bit(folder: Path) -> None:
    """Change the last byte of the weights, leaving the size as it is."""
    path = folder / "policy.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def drop_entry(folder: Path, name: str, *, file: bool = False) -> None:
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    del manifest[name]
    (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    if file:
        (folder / name).unlink()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a flipped bit": flip_a_bit,
    "a truncated file": lambda folder: (folder / "optimizer.safetensors").write_bytes(b"short"),
    "a missing file": lambda folder: (folder / "policy.safetensors").unlink(),
    "a missing manifest": lambda folder: (folder / MANIFEST).unlink(),
    "a manifest without an entry": lambda folder: drop_entry(folder, "optimizer.safetensors"),
    "an entry and its file gone": lambda folder: drop_entry(folder, "optimizer.safetensors", file=True),
    "a file that nobody wrote": lambda folder: (folder / "critic.safetensors").touch(),
    "an empty manifest": lambda folder: (folder / MANIFEST).write_text("{}", encoding="utf-8"),
    "a manifest that is a list": lambda folder: (folder / MANIFEST).write_text("[1]", encoding="utf-8"),
    "a half-written manifest": lambda folder: (folder / MANIFEST).write_text('{"policy', encoding="utf-8"),
}


@pytest.mark.parametrize("damage", sorted(DAMAGES))
def test_damaged_checkpoint_falls_back_to_older(damage: str, tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    DAMAGES[damage](tmp_path / "step-000002")
    state = load_newest(tmp_path, make_learner(), identity=IDENTITY)
    assert state is not None
    assert state["iteration"] == 1
    assert names(tmp_path) == ["damaged-step-000002", "step-000001"]


def test_same_step_may_be_damaged_twice(tmp_path: Path) -> None:
    for _ in range(2):
        save_steps(tmp_path, 1, 2)
        flip_a_bit(tmp_path / "step-000002")
        load_newest(tmp_path, make_learner(), identity=IDENTITY)
    assert names(tmp_path) == ["damaged-step-000002", "damaged-step-000002.1", "step-000001"]


def test_only_damaged_checkpoints_are_an_error(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    for step in (1, 2):
        flip_a_bit(tmp_path / f"step-{step:06d}")
    with pytest.raises(CheckpointError, match="all 2 checkpoints are damaged"):
        load_newest(tmp_path, make_learner(), identity=IDENTITY)
    assert names(tmp_path) == ["damaged-step-000001", "damaged-step-000002"]


def test_half_written_checkpoint_is_ignored_and_removed(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    half = tmp_path / ".tmp-2"
    half.mkdir()
    (half / "policy.safetensors").write_bytes(b"half")
    state = load_newest(tmp_path, make_learner(), identity=IDENTITY)
    assert state is not None
    assert state["iteration"] == 1
    assert half.exists()
    save_steps(tmp_path, 2)
    assert names(tmp_path) == ["step-000001", "step-000002"]


@pytest.mark.parametrize(
    ("identity", "named"),
    [
        ({"config": "c2", "data": "d1"}, "config (c1 -> c2)"),
        ({"config": "c2", "data": "d2"}, "config (c1 -> c2), data (d1 -> d2)"),
        ({"config": "c1"}, "data (d1 -> unset)"),
        ({**IDENTITY, "code": "x"}, "code (unset -> x)"),
    ],
)
def test_checkpoint_of_other_run_is_refused(identity: dict[str, str], named: str, tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    learner = make_learner()
    learner.update(strategies.random_samples(0), seed=0)  # now it differs from the checkpoint
    before = weights_of(learner.policy)
    with pytest.raises(CheckpointError, match=f"belongs to a run with a different {re.escape(named)}\n"):
        load_newest(tmp_path, learner, identity=identity)
    assert torch.equal(weights_of(learner.policy), before)
    assert names(tmp_path) == ["step-000001"]


def test_checkpoint_of_other_model_is_refused(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    config = strategies.rl_config()
    other = Learner(strategies.tiny_llama(num_hidden_layers=1), None, algorithm=ALGORITHMS["grpo"], config=config)
    with pytest.raises(CheckpointError, match="have different parameters"):
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
def test_full_disk_keeps_earlier_checkpoint(limit: int, history: int, tmp_path: Path) -> None:
    learner = save_steps(tmp_path, 1)
    with files_of_at_most(limit), pytest.raises(StorageError, match="step 2 could not be written") as caught:
        save_checkpoint(tmp_path, 2, learner, run_state={"identity": IDENTITY, "history": "x" * history})
    assert caught.value.where == str(tmp_path)
    assert "free space" in caught.value.fix
    assert names(tmp_path) == ["step-000001"]
    assert is_intact(tmp_path / "step-000001")


def test_checkpoints_are_pruned_by_number(tmp_path: Path) -> None:
    save_steps(tmp_path, 999_998, 999_999, 1_000_000, keep=2)
    assert names(tmp_path) == ["step-1000000", "step-999999"]
    state = load_newest(tmp_path, make_learner(), identity=IDENTITY)
    assert state is not None
    assert state["iteration"] == 1_000_000


def test_protected_checkpoints_are_kept(tmp_path: Path) -> None:
    learner = make_learner()
    for step in range(1, 8):  # one rule has seen step 2 to be sound, another step 4
        state = {"identity": IDENTITY, "iteration": step}
        save_checkpoint(tmp_path, step, learner, run_state=state, keep=2, protected=(min(step, 2), min(step, 4)))
    assert names(tmp_path) == ["step-000002", "step-000004", "step-000006", "step-000007"]
    assert load_newest(tmp_path, learner, identity=IDENTITY, up_to=5) == {"identity": IDENTITY, "iteration": 4}
    assert load_newest(tmp_path, learner, identity=IDENTITY, up_to=1) is None


def test_steps_to_keep_by_hand() -> None:
    assert steps_to_keep([2, 4, 6, 8, 10], keep=2, protected=[]) == {8, 10}
    assert steps_to_keep([2, 4, 6, 8, 10], keep=1, protected=[5, 4, 1, 0, 99]) == {4, 10}


# A run's verdicts: any course of two rules, one of them read only now and then (gaming, at evaluations).
HEALTH = HealthConfig(kl=LimitConfig(patience=2), reward_hacking=LimitConfig(patience=1))
readings = st.fixed_dictionaries(
    {"kl/ref": st.sampled_from([0.1, 9.0])},
    optional={"eval/accuracy": st.sampled_from([0.9, 0.5]), "mismatch/kl": st.sampled_from([0.0, 9.0])},
)


@given(
    st.lists(readings, min_size=1, max_size=20),
    st.integers(1, 4),
    st.integers(0, 1),
)
def test_pruning_keeps_checkpoint_of_health_rules(rows: list[dict[str, float]], every: int, staleness: int) -> None:
    history: list[dict[str, float]] = []
    kept: set[int] = set()
    written: set[int] = set()
    for iteration, row in enumerate(rows, start=1):
        history.append({"iteration": iteration, "reward/mean": iteration, "staleness": float(staleness), **row})
        verdict = HealthMonitor(HEALTH).update(history)
        goal = [
            max((step for step in steps if step <= verdict.last_healthy), default=None) for steps in (kept, written)
        ]
        assert goal[0] == goal[1]
        if verdict.stop is None and iteration % every == 0:
            written.add(iteration)
            kept = steps_to_keep({*kept, iteration}, keep=2, protected=verdict.last_healthy_by_rule.values())
    assert len(kept) <= 2 + len(LIMITS)


OTHER_IDENTITY = {"config": "c1"}


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that writes nothing before the event is set."""
    may_write = threading.Event()

    def write(*arguments: Any, **settings: Any) -> Path:
        may_write.wait()
        return write_checkpoint(*arguments, **settings)

    monkeypatch.setattr(checkpoint, "write_checkpoint", write)
    yield may_write
    may_write.set()


def test_background_write_is_a_snapshot(slow_disk: threading.Event, tmp_path: Path) -> None:
    learner, history = make_learner("ppo"), [1.0]
    learner.update(strategies.random_samples(0), seed=0)
    saved = weights_of(learner.policy), weights_of(learner.critic)
    with closing(CheckpointWriter()) as writer:
        writer.save(tmp_path, 1, learner, run_state={"identity": OTHER_IDENTITY, "history": history})
        learner.update(strategies.random_samples(1), seed=1)
        history.append(2.0)
        assert not (tmp_path / "step-000001").exists()
        slow_disk.set()
    restored = make_learner("ppo")
    assert load_newest(tmp_path, restored, identity=OTHER_IDENTITY) == {"identity": OTHER_IDENTITY, "history": [1.0]}
    assert torch.equal(weights_of(restored.policy), saved[0])
    assert torch.equal(weights_of(restored.critic), saved[1])
    assert restored.policy_version == 1
    restored.update(strategies.random_samples(1), seed=1)  # with the moments of the moment
    assert torch.equal(weights_of(restored.policy), weights_of(learner.policy))


def test_next_checkpoint_waits(slow_disk: threading.Event, tmp_path: Path) -> None:
    learner = make_learner()
    with closing(CheckpointWriter()) as writer:
        writer.save(tmp_path, 1, learner, run_state={"identity": OTHER_IDENTITY})
        threading.Timer(0.1, slow_disk.set).start()
        writer.save(tmp_path, 2, learner, run_state={"identity": OTHER_IDENTITY})
        assert is_intact(tmp_path / "step-000001")
    assert is_intact(tmp_path / "step-000002")


def test_checkpoint_is_synchronous_without_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    learner = make_learner()
    for number, free in enumerate((0, None), start=1):
        monkeypatch.setattr(checkpoint, "free_bytes", lambda _, free=free: free)
        writer = CheckpointWriter()
        writer.save(tmp_path, number, learner, run_state={"identity": OTHER_IDENTITY})
        assert is_intact(tmp_path / f"step-{number:06d}")
        assert not writer._thread._threads  # nothing was started


@pytest.mark.parametrize("asked", ["save", "wait", "close"])
def test_background_error_is_raised_next(asked: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    folder = tmp_path / "file" / "folder"
    writer = CheckpointWriter()
    writer.save(folder, 1, make_learner(), run_state={"identity": OTHER_IDENTITY})
    ask = partial(writer.save, folder, 2, make_learner(), run_state={}) if asked == "save" else getattr(writer, asked)
    with pytest.raises(StorageError, match="step 1 could not be written"):
        ask()
    writer.close()  # told once


def test_snapshot_size_equals_files(tmp_path: Path) -> None:
    learner = make_learner("ppo")
    learner.update(strategies.random_samples(0), seed=0)
    snapshot = capture_state(learner, run_state={})
    size = sum(path.stat().st_size for path in write_checkpoint(tmp_path, 1, snapshot).glob("*.safetensors"))
    numbers = sum(p.numel() for model in (learner.policy, learner.critic) if model for p in model.parameters())
    assert snapshot.copied().num_bytes == snapshot.num_bytes == pytest.approx(12 * numbers, rel=0.01)
    assert snapshot.num_bytes <= size < 1.2 * snapshot.num_bytes


def written(path: Path, *lines: str) -> AppendOnlyFile:
    file = AppendOnlyFile(path)
    for line in lines:
        file.add(line)
    file.seal()
    return file


def test_sealed_prefix_is_found(tmp_path: Path) -> None:
    path = tmp_path / "new" / "lines"
    file = written(path, "a", "b")
    seal = file.seal()
    file.add("c")
    longer = file.seal()
    assert path.read_text() == "a\nb\nc\n"
    assert has_sealed_prefix(path, seal) and has_sealed_prefix(path, longer)
    assert AppendOnlyFile(path).restore(seal) == ["a", "b"]


def test_lines_after_seal_are_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    seal = written(path, "a").seal()
    written(path, "a", "lost", "lost")
    again = AppendOnlyFile(path)
    again.restore(seal)
    again.add("b")
    again.seal()
    assert path.read_text() == "a\nb\n"


def test_file_without_seal_starts_empty(tmp_path: Path) -> None:
    written(tmp_path / "lines", "of", "a", "run", "without", "checkpoint")
    again = AppendOnlyFile(tmp_path / "lines")
    assert again.restore(None) == []
    again.add("b")
    again.seal()
    assert (tmp_path / "lines").read_text() == "b\n"


@pytest.mark.parametrize("content", ["x\nb\n", "a\n", ""])
def test_changed_file_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "lines"
    seal = written(path, "a", "b").seal()
    path.write_text(content)
    assert not has_sealed_prefix(path, seal)
    with pytest.raises(CheckpointError, match="differs from the seal of the newest checkpoint"):
        AppendOnlyFile(path).restore(seal)


def test_lines_wait_for_full_disk(tmp_path: Path) -> None:
    file = written(tmp_path / "lines", "a")
    file.add("b" * 2000)
    with files_of_at_most(1000), pytest.raises(StorageError, match="could not be written"):
        file.seal()
    file.seal()
    assert (tmp_path / "lines").read_text() == "a\n" + "b" * 2000 + "\n"


RUN_STATE = {"identity": IDENTITY, "iteration": 2, "history": [{"reward/mean": 0.1 + 0.2}]}
REFERENCE = strategies.tiny_llama(seed=7)
RUN_NAMES = ["grpo", "ppo", "ppo shared", "ppo lora", "ppo 8bit", "ppo_penalty"]
RUNS = pytest.mark.parametrize("name", RUN_NAMES)
ADAPTER = LoraConfig(rank=2)


def stateful_learner(name: str = "grpo") -> Learner:
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


def train_iterations(learner: Learner, first: int, last: int) -> list[dict[str, float]]:
    """Iterations ``first`` to ``last``; the rollouts' log-probabilities come from the policy as it is then."""
    history = []
    for iteration in range(first, last + 1):
        groups = strategies.random_groups(learner.policy, iteration)
        kl: dict[str, Any] = {"kl": learner.config.kl, "kl_coefficient": learner.kl.coefficient}
        models = (learner.policy, REFERENCE, learner.critic)
        experience = learners.experience_of(groups, learner.algorithm, *models, **kl)
        stats = learner.update(experience.samples, seed=iteration)
        learner.observe_kl(experience.mean_kl, len(experience.samples))
        history.append({**stats.metrics, **experience.metrics})
    return history


def outcome_of(learner: Learner, history: list[dict[str, float]]) -> tuple[bytes, str]:
    """All weights and all metrics, for comparison bit for bit."""
    models = [learner.policy] if learner.critic is None else [learner.policy, learner.critic]
    return torch.cat([weights_of(model) for model in models]).numpy().tobytes(), json.dumps(history, sort_keys=True)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, tuple[bytes, str]]]:
    """For each run: the folder of a checkpoint after two iterations, and the outcome of going on for two more."""
    made = {}
    for name in RUN_NAMES:
        root, learner = tmp_path_factory.mktemp(name), stateful_learner(name)
        train_iterations(learner, 1, 2)
        save_checkpoint(root, 2, learner, run_state=RUN_STATE)
        made[name] = root, outcome_of(learner, train_iterations(learner, 3, 4))
    return made


@RUNS
def test_resumed_run_equals_uninterrupted_run(name: str, stopped: Any) -> None:
    root, uninterrupted = stopped[name]
    learner = stateful_learner(name)
    assert load_newest(root, learner, identity=IDENTITY) == RUN_STATE
    assert outcome_of(learner, train_iterations(learner, 3, 4)) == uninterrupted


# Each sets an item of a learner back to what it is in a fresh one.
FORGETTERS: dict[str, Callable[[Any, Any], object]] = {
    "policy": lambda learner, fresh: learner.policy.load_state_dict(fresh.policy.state_dict()),
    "critic": lambda learner, fresh: learner.value_module.load_state_dict(fresh.value_module.state_dict()),
    "optimizer": lambda learner, _: learner.optimizer.state.clear(),
    "critic optimizer": lambda learner, _: learner.critic_optimizer.state.clear(),
    "KL coefficient": lambda learner, fresh: setattr(learner, "kl", fresh.kl),
    "penalty": lambda learner, fresh: setattr(learner, "penalty", fresh.penalty),
    "policy version": lambda learner, fresh: setattr(learner, "policy_version", fresh.policy_version),
}


def restored_items(name: str) -> list[str]:
    """A head on the policy's backbone is in the policy's optimizer. The run with a penalty differs by it alone."""
    if name == "ppo_penalty":
        return ["penalty"]
    if name in ("ppo shared", "ppo lora", "ppo 8bit"):  # stored as those of ppo, but for these
        return ["critic", "optimizer"]
    return [item for item in sorted(FORGETTERS) if item != "penalty"]


@pytest.mark.parametrize(("name", "item"), [(name, item) for name in RUN_NAMES[1:] for item in restored_items(name)])
def test_every_restored_item_matters(name: str, item: str, stopped: Any) -> None:
    root, uninterrupted = stopped[name]
    learner = stateful_learner(name)
    load_newest(root, learner, identity=IDENTITY)
    FORGETTERS[item](learner, stateful_learner(name))
    assert outcome_of(learner, train_iterations(learner, 3, 4)) != uninterrupted


@RUNS
def test_checkpoint_round_trip(name: str, stopped: Any, tmp_path: Path) -> None:
    root, _ = stopped[name]
    learner = stateful_learner(name)
    load_newest(root, learner, identity=IDENTITY)
    again = save_checkpoint(tmp_path, 2, learner, run_state=RUN_STATE)
    first = json.loads((root / "step-000002" / MANIFEST).read_text(encoding="utf-8"))
    assert json.loads((again / MANIFEST).read_text(encoding="utf-8")) == first
    assert {path.suffix for path in again.iterdir()} == {".json", ".safetensors"}
