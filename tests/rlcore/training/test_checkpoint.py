"""Checkpoint files: damage, other runs, half-written folders and a full disk are survived; old ones are pruned."""

from __future__ import annotations

import json
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcore.algorithms.table import ALGORITHMS
from rlcore.checks.health import check_health
from rlcore.config import LIMITS, HealthConfig, LimitConfig
from rlcore.errors import CheckpointError, StorageError
from rlcore.training.checkpoint import is_intact, load_newest, save_checkpoint, steps_to_keep
from rlcore.training.learner import Learner
from rlcore.training.manifest import MANIFEST
from tests import learners, strategies
from tests.learners import weights_of

IDENTITY = {"config": "c1", "data": "d1"}
make_learner = partial(learners.make_learner, dtype=torch.float32)


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
    """Return the names in a folder."""
    return sorted(path.name for path in root.iterdir())


def flip_a_bit(folder: Path) -> None:
    """Change the last byte of the weights, leaving the size as it is."""
    path = folder / "policy.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def drop_entry(folder: Path, name: str, *, file: bool = False) -> None:
    """Take an entry out of the manifest, and the file with it."""
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
    with pytest.raises(CheckpointError, match="all 2 checkpoints are damaged"):
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
def test_a_checkpoint_of_another_run_is_refused_by_name(identity: dict[str, str], named: str, tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    learner = make_learner()
    learner.update(strategies.random_samples(0), seed=0)  # now it differs from the checkpoint
    before = weights_of(learner.policy)
    with pytest.raises(CheckpointError, match=f"belongs to a run with a different {re.escape(named)}\n"):
        load_newest(tmp_path, learner, identity=identity)
    assert torch.equal(weights_of(learner.policy), before)
    assert names(tmp_path) == ["step-000001"]


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
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


def test_what_a_run_may_go_back_to_is_spared_and_found_again(tmp_path: Path) -> None:
    learner = make_learner()
    for step in range(1, 8):  # one rule has seen step 2 to be sound, another step 4
        state = {"identity": IDENTITY, "iteration": step}
        save_checkpoint(tmp_path, step, learner, run_state=state, keep=2, protected=(min(step, 2), min(step, 4)))
    assert names(tmp_path) == ["step-000002", "step-000004", "step-000006", "step-000007"]
    assert load_newest(tmp_path, learner, identity=IDENTITY, up_to=5) == {"identity": IDENTITY, "iteration": 4}
    assert load_newest(tmp_path, learner, identity=IDENTITY, up_to=1) is None


def test_the_steps_to_keep_are_the_newest_and_the_newest_up_to_each_that_is_spared() -> None:
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
def test_pruning_never_takes_the_checkpoint_that_a_later_verdict_goes_back_to(
    rows: list[dict[str, float]], every: int, staleness: int
) -> None:
    history: list[dict[str, float]] = []
    kept: set[int] = set()
    written: set[int] = set()
    for iteration, row in enumerate(rows, start=1):
        history.append({"iteration": iteration, "reward/mean": iteration, "staleness": float(staleness), **row})
        verdict = check_health(history, HEALTH)
        goal = [
            max((step for step in steps if step <= verdict.last_healthy), default=None) for steps in (kept, written)
        ]
        assert goal[0] == goal[1]
        if verdict.stop is None and iteration % every == 0:
            written.add(iteration)
            kept = steps_to_keep({*kept, iteration}, keep=2, protected=verdict.last_healthy_by_rule.values())
    assert len(kept) <= 2 + len(LIMITS)
