"""Progress of an RL run: the mutable state that a checkpoint stores, its history, checkpoints and health checks."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlcore.checks.audit.audit import Audit
from rlcore.checks.canaries.sync import EngineCalibration
from rlcore.checks.causes import explained
from rlcore.checks.health import HealthFinding, HealthMonitor, HealthReport
from rlcore.components import Components
from rlcore.errors import CheckpointError, TrainingError
from rlcore.loop.prefetch import RolloutPrefetcher
from rlcore.loop.prompt_schedule import PromptSchedule
from rlcore.loop.recorder import HealthStop, Recorder
from rlcore.progress import begin
from rlcore.training.learner_protocol import LearnerProtocol
from rlcore.training.manifest import AppendOnlyFile, Seal

NAME = "history.jsonl"
Row = dict[str, float]
_RESTART = "; if the rules have changed since it began, remove {} to restart"

START: Mapping[str, Any] = MappingProxyType(
    {"iteration": 0, "sealed_files": {}, "prompt_schedule": {}, "prefetched": "", "audit": {}}
)
"""State of a run before its first iteration."""


@dataclass(kw_only=True, slots=True, eq=False)
class Run:
    """Progress of a run.

    Attributes:
        served_version: Version of the weights that the engine serves or loads next.
        findings: Findings of the health rules, each with its iteration.
        pending_audit_state: JSON state of the audit after the last iteration. Empty during an update, and if a
            checkpoint has it.
        protected_steps: Iterations whose checkpoints the health rules may restore.
        is_sync_proven: True if probes were compared after a sync of this process, or after the newest restore.
        began, check_seconds: Time at which the run was opened, and the wall seconds of its canaries.
    """

    components: Components
    recorder: Recorder
    checkpoints: Checkpoints
    prompt_schedule: PromptSchedule
    prefetcher: RolloutPrefetcher
    audit: Audit
    history: History
    health_monitor: HealthMonitor
    calibrations: tuple[EngineCalibration, ...]
    iterations_done: int = 0
    served_version: int = 0
    findings: list[dict[str, Any]] = field(default_factory=list)
    stop: HealthStop | None = None
    pending_audit_state: str = ""
    protected_steps: tuple[int, ...] = ()
    is_sync_proven: bool = False
    began: float = field(default_factory=time.perf_counter)
    check_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """True if every iteration is done, or a health rule stopped the run."""
        return self.stop is not None or self.iterations_done == self.components.config.num_iterations

    @property
    def checks_time_fraction(self) -> float:
        """Seconds of canaries and audit as a fraction of those since the run was opened."""
        spent = self.audit.seconds + self.check_seconds.get("canaries", 0.0)
        return spent / max(time.perf_counter() - self.began, 1e-9)

    def state(self) -> dict[str, Any]:
        """Return the JSON state for a checkpoint, without the learner's and the iteration number.

        It has the digest of the history, whose rows are on disk when this returns.
        """
        return {
            "sealed_files": self.history.seal(),
            "prompt_schedule": self.prompt_schedule.state(),
            "prefetched": self.prefetcher.state(),
            "audit": self.audit.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state of :meth:`state`. The learner has been restored already."""
        self.is_sync_proven = False
        self.history.restore(state["sealed_files"])
        self._replay_health()
        _restore_position(self, state)
        self.audit.restore(state["audit"])

    def _replay_health(self) -> None:
        """Recompute all findings from the history. Storing them would make checkpoints grow with the run."""
        self.health_monitor, self.findings = HealthMonitor(self.components.health), []
        rows: list[Mapping[str, float]] = []
        for row in self.history:
            rows.append(row)
            _apply_health_rules(self, rows)


def _restore_position(run: Run, state: Mapping[str, Any]) -> None:
    """Restore the number of iterations, their prompts and the prefetched rollouts; history and audit stay."""
    run.iterations_done = int(state["iteration"])
    run.prompt_schedule.restore(state["prompt_schedule"])
    run.prefetcher.restore(state["prefetched"], run.iterations_done + 1)


def _apply_health_rules(run: Run, rows: Sequence[Mapping[str, float]]) -> tuple[HealthReport, list[HealthFinding]]:
    """Apply the rules to new rows; return the report, and its new findings, which are recorded with their cause."""
    report = run.health_monitor.update(rows)
    known = {(each["rule"], each["level"], each["since"]) for each in run.findings}
    new = [each for each in report.findings if (each.rule, each.level, each.since) not in known]
    new = [explained(each, rows, run.components.config) for each in new]
    run.findings += [{"iteration": int(rows[-1]["iteration"]), **asdict(each)} for each in new]
    return report, new


def check_run_health(run: Run) -> tuple[HealthReport, dict[str, float]]:
    """Return the health report after the newest iteration, and the number of findings as ``health/...``.

    New findings are recorded and logged. A rule without patience left stops the run, unless the configuration only
    warns.
    """
    report, new = _apply_health_rules(run, run.history)
    for finding in new:
        run.recorder.log(f"health {finding.level}: {finding}\n  fix: {finding.fix}")
    if report.stop and run.components.health.action == "stop":
        run.stop = HealthStop(
            finding=explained(report.stop, run.history, run.components.config),
            iteration=run.iterations_done,
            restored_iteration=report.last_healthy,
        )
    warnings = sum(finding.level == "warn" for finding in report.findings)
    return report, {
        "health/warnings": float(warnings),
        "health/alarms": float(len(report.findings) - warnings),
    }


def restore_last_healthy(run: Run, stop: HealthStop) -> None:
    """Restore the newest checkpoint up to the last healthy iteration. The history keeps all iterations.

    Raises:
        TrainingError: No such checkpoint exists, because the run was unhealthy from the start.
    """
    run.prefetcher.drain()
    state = run.checkpoints.load(up_to=stop.restored_iteration)
    if state is None:
        raise TrainingError(
            f"health rule {stop.finding.rule} stopped the run at iteration {stop.iteration}, "
            f"and no healthy checkpoint exists: {stop.finding}",
            where=f"health.{stop.finding.rule}",
            fix=stop.finding.fix + (_RESTART.format(run.components.folder) if stop.restored_iteration else ""),
        )
    _restore_position(run, state)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """Result of a run; the learner has the trained policy.

    Attributes:
        history: Metrics of each iteration up to that of the learner's weights.
        rolled_back_history: Metrics of later iterations, if a health rule stopped the run.
    """

    history: tuple[Mapping[str, float], ...]
    findings: tuple[Mapping[str, Any], ...]
    stop: HealthStop | None
    rolled_back_history: tuple[Mapping[str, float], ...]

    @property
    def took_steps(self) -> bool:
        """True if any iteration changed the policy."""
        return any(row.get("gradient_norm", 1.0) for row in self.history)


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the wall seconds of a block under its name, which is also shown as the phase of the iteration."""
    begin(name)
    with counted(seconds, name):
        yield


@contextmanager
def counted(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the wall seconds of a block under its name."""
    started = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started


class History(list[Row]):
    """Rows, one per iteration: its number under ``iteration``, and its metrics. Also in an append-only file.

    A checkpoint stores the file's length and digest, so its size does not grow with the number of iterations.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._lines = AppendOnlyFile(folder / NAME)

    def append(self, row: Mapping[str, float]) -> None:
        super().append(_with_shared_names(row))
        self._lines.add(json.dumps(self[-1]))

    def has(self, metric: str) -> bool:
        return any(metric in row for row in self)

    def seal(self) -> dict[str, Seal]:
        """Flush all rows to disk and return the length and digest of the file, by file name.

        Raises:
            StorageError: The disk is full or write-protected.
        """
        return {NAME: self._lines.seal()}

    def restore(self, sealed: Mapping[str, Seal]) -> None:
        """Restore the rows that :meth:`seal` covered, and drop later ones.

        Raises:
            CheckpointError: The file differs from what was sealed.
        """
        self[:] = (_with_shared_names(json.loads(line)) for line in self._lines.restore(sealed.get(NAME)))


def _with_shared_names(row: Mapping[str, float]) -> Row:
    """Return a row that shares its names with all others: own ones would be most of the memory of a long history."""
    shared: Row = {sys.intern(name): float(value) for name, value in row.items()}
    return shared | {"iteration": int(row["iteration"])}


class Checkpoints:
    """Checkpoints of one run in ``folder``, which the learner writes; only those with the same ``identity`` are loaded.

    The clock, in seconds, decides when a checkpoint is written, never what a run computes: a killed run ends with the
    same weights.
    """

    def __init__(
        self,
        folder: Path,
        learner: LearnerProtocol,
        *,
        identity: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._learner, self._clock, self._identity = folder, learner, clock, dict(identity)
        self._last = clock()

    def is_due(self, iteration: int) -> bool:
        """Return True if a checkpoint is written after this iteration.

        The first iteration has one, which shows early whether the disk has room, and which a stopped run can restore.
        The last has one too. In between :class:`rlcore.config.CheckpointConfig` decides.
        """
        config = self._learner.config
        if iteration in (1, config.num_iterations):
            return True
        every = config.checkpoints
        if every.every_iterations:
            return iteration % every.every_iterations == 0
        return self._clock() - self._last >= 60.0 * every.every_minutes

    def save(self, iteration: int, *, run_state: Mapping[str, Any], protected: Collection[int] = ()) -> None:
        """Write a checkpoint in the background. Keep the newest one up to each iteration in ``protected``.

        Raises:
            StorageError: This checkpoint or the previous one could not be written. Earlier ones are untouched.
        """
        state = {**run_state, "iteration": iteration, "identity": self._identity}
        self._learner.save(self._folder, iteration, run_state=state, protected=protected)
        self._last = self._clock()

    def load(self, *, up_to: int | None = None) -> dict[str, Any] | None:
        """Restore the learner from the newest checkpoint (up to ``up_to``). Return its run state, or None without one.

        Raises:
            CheckpointError: It has another identity, or every checkpoint is damaged.
        """
        return self._learner.load(self._folder, identity=self._identity, up_to=up_to)

    def load_for(self, num_iterations: int) -> dict[str, Any] | None:
        """Restore the newest checkpoint; of a longer run, the one after exactly ``num_iterations``.

        Earlier ones of a longer run are not continued, because that would overwrite its history.

        Raises:
            CheckpointError: As :meth:`load`, or the run is longer and has no such checkpoint.
        """
        state = self.load()
        if state is None or state["iteration"] <= num_iterations:
            return state
        done, state = state["iteration"], self.load(up_to=num_iterations)
        if state is None or state["iteration"] != num_iterations:
            raise CheckpointError(
                f"{done} iterations are done, num_iterations = {num_iterations}, and no checkpoint after exactly "
                f"{num_iterations} is kept",
                where=str(self._folder),
                fix=f"set num_iterations to {done} or more, or name another folder to start anew",
            )
        return state

    def close(self) -> None:
        self._learner.wait()
