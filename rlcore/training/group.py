"""A learner that several processes of this machine are together, behind the handle of one.

The process that runs the loop starts the ranks, sends each of them the same request over a pipe of its own, and takes
the first one's answer. It holds neither weights nor a process group itself. A rank that dies, raises, or does not
answer in time is named at once, and all are ended: what they had is gone, and the newest checkpoint is not.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

import rlcore
from rlcore import errors
from rlcore.algorithms.settings import resolve_algorithm
from rlcore.config.placement import PlacementConfig
from rlcore.errors import ConfigError, LearnerLostError, RlcoreError, TrainingError
from rlcore.machine import PRECISIONS
from rlcore.memory import Footprint
from rlcore.models.runtime import Runtime
from rlcore.packing import TokenSequence
from rlcore.training.building import LearnerPlan
from rlcore.training.exported import ExportedWeights
from rlcore.training.handle import PolicyFacts
from rlcore.training.judges import Passes
from rlcore.training.totals import UpdateStats
from rlcore.training.wire import decode, encode
from rlcore.types import Rollout, TrainingSample

_GRACE_SECONDS = 5.0  # for the others' answers, after one rank has failed
_MEMORY = Path("/dev/shm")
_MODULE = "rlcore.training.rank_process"


class LearnerGroup:
    """A :class:`~rlcore.training.handle.LearnerHandle` on ranks, which says what each method does.

    Where ranks were lost, :meth:`load` alone starts others: they hold the newest checkpoint then, or the first weights.
    """

    def __init__(
        self, plan: LearnerPlan, placement: PlacementConfig, runtime: Runtime, *, note: Callable[[str], None]
    ) -> None:
        """Start the ranks. ``runtime``: what each computes in; ``note`` shows a sentence to people.

        Raises:
            ConfigError: there are fewer GPUs than ranks.
            ModelError: a checkpoint cannot be trained.
        """
        self.config, self.algorithm = plan.config, resolve_algorithm(plan.config)
        self._plan, self._placement, self._runtime, self._note = plan, placement, runtime, note
        self._devices = rank_devices(placement, runtime.device)
        self._folder = Path(tempfile.mkdtemp(prefix="rlcore-ranks-", dir=_MEMORY if _MEMORY.is_dir() else None))
        self._ends: list[Connection] = []
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._starts, self._tokens = 0, 0  # 0 tokens: as many as configured
        self._budget = plan.config.update.tokens_per_microbatch
        self.policy_version, self.kl_coefficient = 0, plan.config.kl.coefficient
        self._exported: ExportedWeights | None = None
        try:
            facts = self._start()
        except BaseException:
            self._end()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self.facts = PolicyFacts(
            config=AutoConfig.from_pretrained(plan.start, local_files_only=True),
            num_parameters=facts["num_parameters"],
            compute_dtype=PRECISIONS[facts["dtype"]],
        )

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._placement.learner_ranks

    @property
    def has_reference(self) -> bool:
        return self.config.kl.coefficient > 0.0

    @property
    def needs_old_logprobs(self) -> bool:
        return self.config.update.epochs * self.config.update.minibatches > 1

    def passes(self, sequences: Sequence[TokenSequence], *, needs_policy: bool, cut: Sequence[int]) -> Passes:
        found: Passes = self._call("passes", sequences, needs_policy=needs_policy, cut=cut)
        return found

    def scores(self, rollouts: Sequence[Rollout]) -> tuple[torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor] = self._call("scores", rollouts)
        return found

    def update(
        self, samples: Sequence[TrainingSample], *, seed: int, measured: bool = False
    ) -> tuple[UpdateStats, Footprint | None]:
        found: tuple[UpdateStats, Footprint | None] = self._call("update", samples, seed=seed, measured=measured)
        return found

    def observe_kl(self, mean_kl: float, num_samples: int) -> None:
        self._call("observe_kl", mean_kl, num_samples)

    def weights(self) -> Mapping[str, torch.Tensor]:
        if self._exported is None or self._exported.policy_version != self.policy_version:
            path = self._folder / "weights.safetensors"
            path.unlink(missing_ok=True)
            self._call("export", path)
            self._exported = ExportedWeights(path, self.policy_version)
        return self._exported

    def save(self, root: Path, step: int, *, run_state: Mapping[str, Any], spared: Collection[int] = ()) -> None:
        self._call("save", root.absolute(), step, run_state=run_state, spared=tuple(spared))

    def load(self, root: Path, *, identity: Mapping[str, str], up_to: int | None = None) -> dict[str, Any] | None:
        if not self._ranks:
            self._restart()
        self._exported = None
        found: dict[str, Any] | None = self._call("load", root.absolute(), identity=identity, up_to=up_to)
        return found

    def wait(self) -> None:
        if self._ranks:
            self._call("wait")

    def save_model(self, start: Path, folder: Path, *, like_start: bool = False) -> None:
        self._call("save_model", start.absolute(), folder.absolute(), like_start=like_start)

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._end()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _restart(self) -> None:
        restarts = self._placement.max_restarts
        if self._starts > restarts:
            raise TrainingError(
                f"ranks were lost {self._starts} times",
                where="placement.max_restarts",
                fix="see the lines above for why; the same command goes on from the newest checkpoint",
            )
        self._note(f"starts {self.size} ranks again ({self._starts} of at most {restarts} times)")
        self._start()

    def _start(self) -> dict[str, Any]:
        """Start every rank; the first one's facts, when all have loaded their models."""
        self._starts += 1
        for rank in range(self.size):
            ours, theirs = Pipe()
            self._ranks.append(self._launch(theirs))
            theirs.close()
            self._ends.append(ours)
            ours.send_bytes(encode(self._setup(rank)))
        return self._answers("start")

    def _launch(self, end: Connection) -> subprocess.Popen[bytes]:
        """A process that finds its setup and its requests at ``end``."""
        paths = [str(Path(rlcore.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        return subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(end.fileno()), str(os.getpid())],
            pass_fds=[end.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # gloo says there whom it has met
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )

    def _setup(self, rank: int) -> dict[str, Any]:
        placement, runtime = self._placement, self._runtime
        return {
            "plan": self._plan.to_json(),
            "rank": rank,
            "size": self.size,
            "store": f"file://{self._folder}/store-{self._starts}",
            "folder": self._folder,
            "device": str(self._devices[rank]),
            "threads": max(1, torch.get_num_threads() // self.size),
            "seconds": 60.0 * placement.deadline_minutes,
            "dtype": str(runtime.compute_dtype).removeprefix("torch."),
            "recompute": runtime.recompute,
            "sharded": placement.is_sharded(adapted=self.config.update.adapter.rank > 0),
            "narrow": placement.narrow,
            "tokens": self._tokens,
        }

    def _call(self, method: str, *arguments: Any, **settings: Any) -> Any:
        """What ``method`` gives, asked of every rank."""
        if not self._ranks:
            raise LearnerLostError("the ranks are gone", fix="start the same command again: it resumes")
        request = encode((method, arguments, settings))
        for rank, end in enumerate(self._ends):
            try:
                end.send_bytes(request)
            except OSError:
                raise self._lost(method, {rank}, {}) from None
        return self._answers(method)["result"]

    def _answers(self, method: str) -> dict[str, Any]:
        """The first rank's answer, when all have given theirs.

        Raises:
            LearnerLostError: a rank died, ran out of memory, failed, or is silent; all are ended.
            RlcoreError: what a rank raised.
        """
        silent, dead = dict(enumerate(self._ends)), set[int]()
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + 60.0 * self._placement.deadline_minutes
        while silent and (ready := wait(silent.values(), timeout=max(0.0, deadline - time.monotonic()))):
            for rank in [rank for rank, end in silent.items() if end in ready]:
                try:
                    answers[rank] = decode(silent.pop(rank).recv_bytes())
                except (EOFError, OSError):
                    dead.add(rank)
            if dead or any("result" not in answer and "dtype" not in answer for answer in answers.values()):
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        faults = {rank: answer for rank, answer in answers.items() if not {"result", "dtype"} & answer.keys()}
        if dead or (silent and not faults) or any("error" not in fault for fault in faults.values()):
            raise self._lost(method, dead, faults, silent=tuple(silent))
        if faults:
            if silent:
                self._end()
            raise _error(min(faults.items())[1]["error"])
        self.policy_version = int(answers[0]["policy_version"])
        self.kl_coefficient = float(answers[0]["kl_coefficient"])
        self._budget = int(answers[0]["tokens"])
        return answers[0]

    def _lost(
        self, method: str, dead: set[int], faults: Mapping[int, Mapping[str, Any]], *, silent: Sequence[int] = ()
    ) -> LearnerLostError:
        """End what is left, and say which rank was lost and how; one without memory begins with smaller batches."""
        reasons = [f"rank {rank} {_ending(self._ranks[rank])}" for rank in sorted(dead)]
        short = {rank: fault["memory"] for rank, fault in faults.items() if "memory" in fault}
        if not reasons and short:
            reasons = [f"rank {rank} ran out of memory ({why})" for rank, why in short.items()]
            self._tokens = max(1, self._budget // 2)
        if not reasons:
            reasons = [f"rank {rank} failed: {fault['crash']}" for rank, fault in faults.items() if "crash" in fault]
        if not reasons:
            minutes = self._placement.deadline_minutes
            reasons = [f"rank {rank} did not answer within {minutes:g} minutes" for rank in silent]
        self._end()
        return LearnerLostError(
            f"{'; '.join(reasons)}, in {method!r} of {self.size} ranks",
            where="placement",
            fix="the run goes on from its newest checkpoint, as does the same command when it is started again",
        )

    def _end(self) -> None:
        """Kill every rank: what it was in the middle of, others may wait for."""
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.wait()
        for end in self._ends:
            end.close()
        self._ranks, self._ends, self._exported = [], [], None


def rank_devices(placement: PlacementConfig, device: torch.device) -> list[torch.device]:
    """The device of each rank, of the kind of ``device``.

    Raises:
        ConfigError: there are fewer GPUs.
    """
    size = placement.learner_ranks
    if device.type != "cuda":
        if placement.devices:
            raise ConfigError(
                "placement.devices names GPUs, and the run computes on a CPU",
                where="placement.devices",
                fix="leave it out",
            )
        return [device] * size
    chosen, count = placement.devices or tuple(range(size)), torch.cuda.device_count()
    if max(chosen) >= count:
        raise ConfigError(
            f"{size} ranks want the GPUs {', '.join(map(str, chosen))}, {count} are visible",
            where="placement.learner_ranks",
            fix="lower it, or name GPUs in placement.devices",
        )
    return [torch.device("cuda", index) for index in chosen]


def _ending(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        return "closed its pipe"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _error(fields: Sequence[str]) -> RlcoreError:
    name, what, where, fix = fields
    kind: type[RlcoreError] = getattr(errors, name)
    return kind(what, where=where, fix=fix)
