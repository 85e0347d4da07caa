"""Checkpoints of a learner: everything that has state in one folder, whole or not there at all.

    .tmp-<step>/ -> weights.safetensors, optimizer.safetensors, ..., state.json -> fsync -> MANIFEST.json (size and
    SHA-256 of each) -> fsync -> rename to step-<step>/ -> fsync of the parent -> prune

The newest folder whose manifest verifies is loaded; a damaged one is renamed aside, never loaded and never deleted.
The run's state may seal files beside the folders under ``beside``: by name, how they begin (:mod:`.sealed`).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from rlcore.algorithms.kl import KlController
from rlcore.checks.audit.integrity import verify_restored
from rlcore.distributed.ranks import Ranks, gather_full, is_shard
from rlcore.distributed.sharded import shard_like
from rlcore.errors import CheckpointError, StorageError
from rlcore.models.saving import fsync, save_tensors
from rlcore.training.learner import Learner
from rlcore.training.loss_scale import LossScale
from rlcore.training.manifest import has_sealed_prefix, matches_manifest, write_manifest
from rlcore.training.optim import parameters_of

STATE = "state.json"
_ALWAYS = ("policy.safetensors", "optimizer.safetensors")
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LearnerState:
    """What a checkpoint is written from: tensors by file, and everything else as JSON."""

    tensors: Mapping[str, Tensors]
    state: str

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors: for weights that learn under Adam, 12 each."""
        return sum(value.nbytes for tensors in self.tensors.values() for value in tensors.values())

    def copied(self) -> LearnerState:
        """The same in memory of its own on the CPU, which no later step of the learner changes."""
        tensors = {
            file: {name: value.to("cpu", copy=True) for name, value in tensors.items()}
            for file, tensors in self.tensors.items()
        }
        return LearnerState(tensors=tensors, state=self.state)


def capture_state(learner: Learner, *, run_state: Mapping[str, Any]) -> LearnerState:
    """The learner's own tensors, no copies, and ``run_state`` (JSON-able: iteration, identity hashes, seals ...).

    Of ranks with shards the first one has the whole tensors, in the machine's memory; all ask at the same point.
    """
    state = {"learner": _scalars(learner), "run": dict(run_state)}
    return LearnerState(tensors=_tensors(learner), state=json.dumps(state, indent=1, sort_keys=True))


def save_checkpoint(
    root: Path,
    step: int,
    learner: Learner,
    *,
    run_state: Mapping[str, Any],
    keep: int = 2,
    protected: Collection[int] = (),
) -> Path:
    """Take a snapshot and write it, as :func:`write_checkpoint` does.

    Raises:
        StorageError: the disk is full or refuses; earlier checkpoints are untouched.
    """
    return write_checkpoint(root, step, capture_state(learner, run_state=run_state), keep=keep, protected=protected)


def write_checkpoint(
    root: Path, step: int, snapshot: LearnerState, *, keep: int = 2, protected: Collection[int] = ()
) -> Path:
    """Write a snapshot atomically.

    The newest ``keep`` checkpoints stay, and for each step in ``protected`` the newest one up to it, because a run may
    have to restore it.

    Raises:
        StorageError: the disk is full or refuses; earlier checkpoints are untouched.
    """
    temporary, final = root / f".tmp-{step}", root / f"step-{step:06d}"
    try:
        _sweep(root)
        temporary.mkdir(parents=True)
        for name, tensors in snapshot.tensors.items():
            save_tensors({key: value.contiguous() for key, value in tensors.items()}, temporary / f"{name}.safetensors")
        (temporary / STATE).write_text(snapshot.state, encoding="utf-8")
        write_manifest(temporary)
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        fsync(root)
        staying = steps_to_keep([_step(path) for path in _steps(root)], keep=keep, protected=protected)
        for old in (path for path in _steps(root) if _step(path) not in staying):
            # Renamed first: a kill in the middle of a deletion must not leave a checkpoint that lacks files.
            old.rename(root / f".tmp-{old.name}")
        _sweep(root)
    except (OSError, SafetensorError) as error:
        _sweep(root)
        raise StorageError(
            f"the checkpoint of step {step} could not be written: {error}",
            where=str(root),
            fix="free space or correct the permissions, then start the same command again: it resumes",
        ) from error
    return final


def steps_to_keep(steps: Collection[int], *, keep: int, protected: Collection[int]) -> set[int]:
    """The newest ``keep`` of ``steps``, and for each of ``protected`` the newest that is not above it."""
    older = ({step for step in steps if step <= bound} for bound in protected)
    return {*sorted(steps)[-keep:], *(max(found) for found in older if found)}


def load_newest(
    root: Path, learner: Learner, *, identity: Mapping[str, str], up_to: int | None = None
) -> dict[str, Any] | None:
    """Restore the learner from the newest intact checkpoint; returns its run state, or None where there is none.

    ``up_to``: of checkpoints after that step none is looked at.

    Raises:
        CheckpointError: the checkpoint belongs to another configuration, data or code (``identity`` differs), or there
            were checkpoints and every one is damaged; or what is held afterwards is not what it holds.
    """
    folder = learner.ranks.broadcast_object(partial(_newest, root, identity, up_to))
    if folder is None:
        return None
    state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    _restore(folder, learner, state["learner"])
    return dict(state["run"])


def _newest(root: Path, identity: Mapping[str, str], up_to: int | None) -> Path | None:
    """The newest intact checkpoint, which is of this run; damaged ones before it are renamed aside."""
    folders = [path for path in _steps(root) if up_to is None or _step(path) <= up_to]
    for folder in reversed(folders):
        if not is_intact(folder):
            _set_aside(folder)
            continue
        stored = json.loads((folder / STATE).read_text(encoding="utf-8"))["run"].get("identity", {})
        differing = sorted(key for key in {*stored, *identity} if stored.get(key) != identity.get(key))
        if differing:
            raise CheckpointError(
                f"the checkpoint was made with another {', '.join(differing)}",
                where=str(folder),
                fix="remove this folder to start anew, or restore what changed",
            )
        return folder
    if folders:
        raise CheckpointError(
            f"all {len(folders)} checkpoints were damaged; they have been renamed aside",
            where=str(root),
            fix="bring one back from a backup, or start the same command again to begin anew",
        )
    return None


def is_intact(folder: Path) -> bool:
    """Whether a checkpoint has the files that its manifest states, with their sizes and SHA-256, and no others.

    Weights, optimizer and state have to be among them. Files beside it that it has sealed begin with what was sealed.
    """
    try:
        if not matches_manifest(folder, at_least={STATE, *_ALWAYS}):
            return False
        beside = json.loads((folder / STATE).read_text(encoding="utf-8"))["run"].get("sealed_files", {})
        return all(has_sealed_prefix(folder.parent / name, seal) for name, seal in beside.items())
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return False


def _tensors(learner: Learner) -> dict[str, Tensors]:
    # state_dict() names tied weights twice and safetensors refuses shared memory: each parameter is saved once.
    tensors: dict[str, Tensors] = {
        "policy": _weights(learner.policy, learner.ranks),
        "optimizer": _optimizer_tensors(learner.optimizer, learner.ranks),
    }
    if learner.value_module is not None:
        tensors["critic"] = _weights(learner.value_module, learner.ranks)
    if learner.critic is not None and not learner.shares_backbone:
        tensors["critic_optimizer"] = _optimizer_tensors(learner.critic_optimizer, learner.ranks)
    return tensors


def _weights(module: torch.nn.Module, ranks: Ranks) -> Tensors:
    return {name: _kept(parameter.detach(), ranks) for name, parameter in module.named_parameters()}


def _kept(tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """A whole tensor as it is; of one in shards, all of it for the rank that writes, and nothing for the others."""
    if not is_shard(tensor):
        return tensor
    gathered = gather_full(tensor)
    return gathered.cpu() if ranks.is_first else gathered.new_empty(0)


def _optimizer_tensors(optimizer: torch.optim.Optimizer, ranks: Ranks) -> Tensors:
    # That of bitsandbytes packs some tensors away in state_dict(), counts in a plain int, and shares its maps.
    return {
        f"{number}/{name}": value.clone() if name.startswith("qmap") else _kept(torch.as_tensor(value), ranks)
        for number, parameter in enumerate(parameters_of(optimizer))
        for name, value in optimizer.state.get(parameter, {}).items()
    }


def _scalars(learner: Learner) -> dict[str, Any]:
    return {
        "policy_version": learner.policy_version,  # where the schedules stand follows from it
        "kl_coefficient": learner.kl.coefficient,
        "tokens_per_microbatch": learner.tokens_per_microbatch,
        "num_skipped": learner.num_skipped,
        "loss_scale": dataclasses.asdict(learner.loss_scale),
    }


def _restore(folder: Path, learner: Learner, scalars: Mapping[str, Any]) -> None:
    _restore_weights(learner.policy, folder / "policy.safetensors")
    _restore_optimizer(learner.optimizer, folder / "optimizer.safetensors")
    if learner.value_module is not None:
        _restore_weights(learner.value_module, folder / "critic.safetensors")
    if learner.critic is not None and not learner.shares_backbone:
        _restore_optimizer(learner.critic_optimizer, folder / "critic_optimizer.safetensors")
    learner.policy_version = scalars["policy_version"]
    learner.tokens_per_microbatch = scalars["tokens_per_microbatch"]
    learner.num_skipped = scalars["num_skipped"]
    learner.loss_scale = LossScale(**scalars["loss_scale"])
    learner.kl = KlController(
        coefficient=scalars["kl_coefficient"], target=learner.kl.target, horizon=learner.kl.horizon
    )
    held = _tensors(learner)  # whole on the first rank
    verify_restored(held if learner.ranks.is_first else {}, folder)


@torch.no_grad()
def _restore_weights(module: torch.nn.Module, path: Path) -> None:
    stored = load_file(path)
    parameters = dict(module.named_parameters())
    if stored.keys() != parameters.keys():
        raise CheckpointError("the checkpoint holds other parameters than the model", where=str(path))
    for name, parameter in parameters.items():
        parameter.copy_(shard_like(parameter, stored[name]))


def _restore_optimizer(optimizer: torch.optim.Optimizer, path: Path) -> None:
    parameters = parameters_of(optimizer)
    restored: dict[int, dict[str, torch.Tensor | int]] = {}
    for key, value in load_file(path).items():
        number, name = key.split("/")
        is_count = value.dtype == torch.int64  # of bitsandbytes; torch's own counts in a float32 tensor
        part = shard_like(parameters[int(number)], value)
        restored.setdefault(int(number), {})[name] = int(value) if is_count else part
    optimizer.load_state_dict({"state": restored, "param_groups": optimizer.state_dict()["param_groups"]})


def _steps(root: Path) -> list[Path]:
    return sorted(root.glob("step-*[0-9]"), key=_step)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _sweep(root: Path) -> None:
    """Remove what a killed run has left half-written or half-deleted."""
    for remains in root.glob(".tmp-*"):
        shutil.rmtree(remains, ignore_errors=True)


def _set_aside(folder: Path) -> None:
    names = (f"damaged-{folder.name}" + (f".{number}" if number else "") for number in itertools.count())
    folder.rename(next(path for name in names if not (path := folder.with_name(name)).exists()))
