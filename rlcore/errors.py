"""Exceptions. Every error that a user can cause states what happened, where, and how to fix it."""

from __future__ import annotations


class RlcoreError(Exception):
    """Base of all errors raised on purpose.

    ``what``: problem and offending value. ``where``: file, row, field or key. ``fix``: the user's action, unless
    ``what`` implies it.
    """

    def __init__(self, what: str, where: str = "", fix: str = "") -> None:
        super().__init__(what, where, fix)  # all three in args: the exception crosses processes
        self.what, self.where, self.fix = what, where, fix

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.fix:
            lines.append(f"  fix:   {self.fix}")
        return "\n".join(lines)


def shown(text: object, *, max_chars: int = 300) -> str:
    """Return external text for an error or a log: truncated, on one line, without control characters."""
    line = str(text)[: max_chars + 1]
    line = line if len(line) <= max_chars else f"{line[: max_chars - 1]}…"
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in line)


class ConfigError(RlcoreError):
    """A preset or an override is wrong; nothing was run."""


class DataError(RlcoreError):
    """A row, a file or a dataset violates its contract."""


class StorageError(RlcoreError):
    """Disk full, no permission, or an artifact that does not match its digest."""


class ModelError(RlcoreError):
    """A model, a tokenizer or a chat template cannot be loaded or used."""


class CheckpointError(RlcoreError):
    """No intact checkpoint, or one of another run."""


class SamplingError(RlcoreError):
    """The rollout engine failed."""


class StaleSamplerError(SamplingError):
    """The rollout engine serves other weights than the learner's."""


class RewardError(RlcoreError):
    """The grader (not the answer) failed too often."""


class CallTimeoutError(RewardError):
    """User code, such as a reward function, timed out; the run can be resumed."""


class SandboxError(RlcoreError):
    """Untrusted programs cannot be isolated on this machine; nothing was run."""


class PromotionError(RlcoreError):
    """The registry's aliases do not allow a promotion or a rollback; none was moved."""


class ServiceError(RlcoreError):
    """A required server (PostgreSQL, Prefect, MLflow, a worker) does not start, or does not answer."""


class CanaryError(RlcoreError):
    """A run-time check found a silent error."""


class TrainingError(RlcoreError):
    """The update cannot continue."""


class NonFiniteError(TrainingError):
    """NaN or infinity instead of a finite number; no optimizer step was taken."""


class LearnerLostError(TrainingError):
    """A learner process died or timed out; the newest checkpoint has its state."""
