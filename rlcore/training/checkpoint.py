"""Checkpoints of a learner: all of its state in one folder, written atomically, in the background if memory allows.

    .tmp-<step>/ -> weights.safetensors, optimizer.safetensors, ..., state.json -> fsync -> MANIFEST.json (size and
    SHA-256 of each) -> fsync -> rename to step-<step>/ -> fsync of the parent -> prune

Loading takes the newest folder whose manifest verifies. A damaged folder is renamed, and neither loaded nor deleted.
In ``sealed_files``, the run's state may seal files next to the folders (:mod:`rlcore.training.manifest`).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.optim import Optimizer

from rlcore.algorithms.kl import KlController
from rlcore.errors import CheckpointError, StorageError
from rlcore.hardware.memory import free_bytes
from rlcore.hardware.sharded import Ranks, gather_full, is_shard, shard_like
from rlcore.models.integrity import verify_restored
from rlcore.models.saving import fsync, save_tensors
from rlcore.training.learner import Learner
from rlcore.training.manifest import has_sealed_prefix, matches_manifest, write_manifest
from rlcore.training.optim import LossScale, parameters_of

STATE = "state.json"
_ALWAYS = ("policy.safetensors", "optimizer.safetensors")
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LearnerState:
    """Content of a checkpoint: tensors by file, and all other state as JSON."""

    tensors: Mapping[str, Tensors]
    state: str

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors: with Adam, 12 per trained weight."""
        return sum(value.nbytes for tensors in self.tensors.values() for value in tensors.values())

    def copied(self) -> LearnerState:
        """Return a copy on the CPU, which later steps of the learner do not change."""
        tensors = {
            file: {name: value.to("cpu", copy=True) for name, value in tensors.items()}
            for file, tensors in self.tensors.items()
        }
        return LearnerState(tensors=tensors, state=self.state)


def capture_state(learner: Learner, *, run_state: Mapping[str, Any]) -> LearnerState:
    """Return the learner's tensors, without copying, and ``run_state`` (JSON: iteration, identity hashes, seals).

    Collective over ranks. With shards, only the first rank gets whole tensors, in CPU memory.
    """
    state = {"learner": _scalars(learner), "run": dict(run_state)}
    return LearnerState(tensors=_tensors(learner), state=json.dumps(state, indent=1, sort_keys=True))


def write_checkpoint(
    root: Path, step: int, state: LearnerState, *, keep: int = 2, protected: Collection[int] = ()
) -> Path:
    """Write a checkpoint atomically and prune older ones.

    The :func:`steps_to_keep` remain, any of which a run may restore.

    Raises:
        StorageError: The checkpoint cannot be written; earlier checkpoints are unchanged.
    """
    temporary, final = root / f".tmp-{step}", root / f"step-{step:06d}"
    try:
        _sweep(root)
        temporary.mkdir(parents=True)
        for name, tensors in state.tensors.items():
            save_tensors({key: value.contiguous() for key, value in tensors.items()}, temporary / f"{name}.safetensors")
        (temporary / STATE).write_text(state.state, encoding="utf-8")
        write_manifest(temporary)
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        fsync(root)
        staying = steps_to_keep([_step(path) for path in _steps(root)], keep=keep, protected=protected)
        for old in (path for path in _steps(root) if _step(path) not in staying):
            # Renamed first: a kill during deletion must not leave a checkpoint that lacks files.
            old.rename(root / f".tmp-{old.name}")
        _sweep(root)
    except (OSError, SafetensorError) as error:
        _sweep(root)
        raise StorageError(
            f"the checkpoint of step {step} could not be written: {error}",
            where=str(root),
            fix="free space or correct the permissions, then run the same command again to resume",
        ) from error
    return final


def steps_to_keep(steps: Collection[int], *, keep: int, protected: Collection[int]) -> set[int]:
    """Return the newest ``keep`` of ``steps``, and for each step in ``protected`` the newest one up to it."""
    older = ({step for step in steps if step <= bound} for bound in protected)
    return {*sorted(steps)[-keep:], *(max(found) for found in older if found)}


def load_newest(
    root: Path, learner: Learner, *, identity: Mapping[str, str], up_to: int | None = None
) -> dict[str, Any] | None:
    """Restore the learner from the newest intact checkpoint; return its run state, or None without a checkpoint.

    ``up_to``: ignore checkpoints after this step.

    Raises:
        CheckpointError: The checkpoint belongs to another configuration, data or code (``identity`` differs), all
            checkpoints are damaged, or the restored state differs from the files.
    """
    folder = learner.ranks.broadcast_object(partial(_newest, root, identity, up_to))
    if folder is None:
        return None
    state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    _restore(folder, learner, state["learner"])
    return dict(state["run"])


def _newest(root: Path, identity: Mapping[str, str], up_to: int | None) -> Path | None:
    folders = [path for path in _steps(root) if up_to is None or _step(path) <= up_to]
    for folder in reversed(folders):
        if not is_intact(folder):
            _set_aside(folder)
            continue
        stored = json.loads((folder / STATE).read_text(encoding="utf-8"))["run"].get("identity", {})
        differing = sorted(key for key in {*stored, *identity} if stored.get(key) != identity.get(key))
        if differing:
            changes = (f"{key} ({stored.get(key, 'unset')} -> {identity.get(key, 'unset')})" for key in differing)
            raise CheckpointError(
                f"the checkpoint belongs to a run with a different {', '.join(changes)}",
                where=str(folder),
                fix=f"undo the change, name another folder, or remove {root} to restart",
            )
        return folder
    if folders:
        raise CheckpointError(
            f"all {len(folders)} checkpoints are damaged and were renamed",
            where=str(root),
            fix="restore one from a backup, or run the same command again to restart",
        )
    return None


def is_intact(folder: Path) -> bool:
    """Return True if a checkpoint has exactly the files of its manifest, with equal sizes and SHA-256.

    Weights, optimizer and state must be among them. Files next to it that it seals must begin with the sealed bytes.
    """
    try:
        if not matches_manifest(folder, at_least={STATE, *_ALWAYS}):
            return False
        sealed = json.loads((folder / STATE).read_text(encoding="utf-8"))["run"].get("sealed_files", {})
        return all(has_sealed_prefix(folder.parent / name, seal) for name, seal in sealed.items())
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return False


def _parts(learner: Learner) -> dict[str, nn.Module | Optimizer]:
    """Return the modules and optimizers of a checkpoint by file; the head of a shared critic is the critic's module."""
    parts: dict[str, nn.Module | Optimizer] = {"policy": learner.policy, "optimizer": learner.optimizer}
    if learner.value_module is not None:
        parts["critic"] = learner.value_module
    if learner.critic is not None and not learner.shares_backbone:
        parts["critic_optimizer"] = learner.critic_optimizer
    return parts


def _tensors(learner: Learner) -> dict[str, Tensors]:
    # state_dict() lists tied weights twice, and safetensors refuses shared memory: save each parameter once.
    return {
        file: _weights(part, learner.ranks) if isinstance(part, nn.Module) else _optimizer_tensors(part, learner.ranks)
        for file, part in _parts(learner).items()
    }


def _weights(module: nn.Module, ranks: Ranks) -> Tensors:
    return {name: _kept(parameter.detach(), ranks) for name, parameter in module.named_parameters()}


def _kept(tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Return a whole tensor unchanged; gather a sharded one on the first rank, and return nothing on the others."""
    if not is_shard(tensor):
        return tensor
    gathered = gather_full(tensor)
    return gathered.cpu() if ranks.is_first else gathered.new_empty(0)


def _optimizer_tensors(optimizer: Optimizer, ranks: Ranks) -> Tensors:
    # bitsandbytes packs some tensors in state_dict(), counts steps in an int, and shares its maps.
    return {
        f"{number}/{name}": value.clone() if name.startswith("qmap") else _kept(torch.as_tensor(value), ranks)
        for number, parameter in enumerate(parameters_of(optimizer))
        for name, value in optimizer.state.get(parameter, {}).items()
    }


def _scalars(learner: Learner) -> dict[str, Any]:
    return {
        "policy_version": learner.policy_version,  # determines the step of the schedules
        "kl_coefficient": learner.kl.coefficient,
        "penalty_coefficient": learner.penalty.coefficient if learner.penalty else 0.0,
        "tokens_per_microbatch": learner.tokens_per_microbatch,
        "num_skipped": learner.num_skipped,
        "loss_scale": dataclasses.asdict(learner.loss_scale),
    }


def _restore(folder: Path, learner: Learner, scalars: Mapping[str, Any]) -> None:
    for file, part in _parts(learner).items():
        path = folder / f"{file}.safetensors"
        if isinstance(part, nn.Module):
            _restore_weights(part, path)
        else:
            _restore_optimizer(part, path)
    learner.policy_version = scalars["policy_version"]
    learner.tokens_per_microbatch = scalars["tokens_per_microbatch"]
    learner.num_skipped = scalars["num_skipped"]
    learner.loss_scale = LossScale(**scalars["loss_scale"])
    learner.kl = KlController(
        coefficient=scalars["kl_coefficient"], target=learner.kl.target, horizon=learner.kl.horizon
    )
    if learner.penalty:
        learner.penalty = dataclasses.replace(learner.penalty, coefficient=scalars["penalty_coefficient"])
    held = _tensors(learner)  # whole on the first rank
    verify_restored(held if learner.ranks.is_first else {}, folder)


@torch.no_grad()
def _restore_weights(module: nn.Module, path: Path) -> None:
    stored = load_file(path)
    parameters = dict(module.named_parameters())
    if stored.keys() != parameters.keys():
        raise CheckpointError("the checkpoint and the model have different parameters", where=str(path))
    for name, parameter in parameters.items():
        parameter.copy_(shard_like(parameter, stored[name]))


def _restore_optimizer(optimizer: Optimizer, path: Path) -> None:
    parameters = parameters_of(optimizer)
    restored: dict[int, dict[str, torch.Tensor | int]] = {}
    for key, value in load_file(path).items():
        number, name = key.split("/")
        is_count = value.dtype == torch.int64  # bitsandbytes; torch counts steps in a float32 tensor
        part = shard_like(parameters[int(number)], value)
        restored.setdefault(int(number), {})[name] = int(value) if is_count else part
    optimizer.load_state_dict({"state": restored, "param_groups": optimizer.state_dict()["param_groups"]})


def _steps(root: Path) -> list[Path]:
    return sorted(root.glob("step-*[0-9]"), key=_step)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _sweep(root: Path) -> None:
    for remains in root.glob(".tmp-*"):
        shutil.rmtree(remains, ignore_errors=True)


def _set_aside(folder: Path) -> None:
    names = (f"damaged-{folder.name}" + (f".{number}" if number else "") for number in itertools.count())
    folder.rename(next(path for name in names if not (path := folder.with_name(name)).exists()))


_SPARE = 2  # copy only if this multiple of its bytes is free, so that the copy cannot exhaust memory


class CheckpointWriter:
    """Writer that copies a learner in memory and writes the copy in a thread, one checkpoint at a time.

    If less CPU memory than twice the checkpoint's size is free, :meth:`save` writes from the live tensors before it
    returns.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")  # starts with the first job
        self._last: Future[Path] | None = None

    def save(
        self,
        root: Path,
        step: int,
        learner: Learner,
        *,
        run_state: Mapping[str, Any],
        protected: Collection[int] = (),
    ) -> None:
        """Start writing the checkpoint of ``step``, after the previous one is on disk.

        Raises:
            StorageError: This or the previous checkpoint could not be written; earlier ones are unchanged.
        """
        self.wait()
        state = capture_state(learner, run_state=run_state)
        if not learner.ranks.is_first:
            return
        free = free_bytes(torch.device("cpu"))
        if free is None or free < _SPARE * state.num_bytes:
            write_checkpoint(root, step, state, protected=tuple(protected))
            return
        self._last = self._thread.submit(write_checkpoint, root, step, state.copied(), protected=tuple(protected))

    def wait(self) -> None:
        """Wait until the newest checkpoint is on disk.

        Raises:
            StorageError: It could not be written.
        """
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def close(self) -> None:
        """Finish writing and end the thread.

        Raises:
            StorageError: The checkpoint could not be written.
        """
        self._thread.shutdown(wait=True)
        self.wait()
