"""The exception tree. Every error a user can cause says what happened, where, and what to do.

RlcoreError
├── ConfigError         a preset or an override is wrong (raised before any work)
├── DataError           a row, a file or a dataset breaks its contract
├── StorageError        the disk refuses: no permission, no space, damaged artifact
├── ModelError          a model, a tokenizer or a chat template cannot be loaded or used
├── CheckpointError     no intact checkpoint, or one that belongs to another run
├── SamplingError       the rollout engine failed
│   └── StaleSamplerError   the engine serves other weights than the learner's
├── RewardError         the grader (not the answer) failed too often
│   └── CallTimeoutError    code that is not ours did not come back in time
├── SandboxError        untrusted programs cannot be isolated on this machine
├── PromotionError      the registry's aliases are not as the change of champion needs them
├── ServiceError        a server that runs need does not start, or does not answer
├── CanaryError         a run-time check found a silently broken run
└── TrainingError       the update cannot go on
    ├── NonFiniteError      NaN or infinity in a loss, gradient, reward or log-ratio
    └── LearnerLostError    a process that learns died or fell silent; what it had is in the newest checkpoint
"""

from __future__ import annotations


class RlcoreError(Exception):
    """Base of all errors raised on purpose.

    Args:
        what: one sentence: what is wrong, with the offending value.
        where: file, row, field or configuration path; empty when there is none.
        fix: what the user should do; empty when it is obvious from ``what``.
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        # All three go to args so that the exception survives pickling across processes.
        super().__init__(what, where, fix)
        self.what, self.where, self.fix = what, where, fix

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.where, self.fix))

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.fix:
            lines.append(f"  fix:   {self.fix}")
        return "\n".join(lines)


def shown(text: object, *, most: int = 300) -> str:
    """Words of somebody else as an error or a log shows them: bounded, on one line, without a terminal's codes."""
    line = str(text)[: most + 1]
    line = line if len(line) <= most else f"{line[: most - 1]}…"
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in line)


def _rebuild(kind: type[RlcoreError], what: str, where: str, fix: str) -> RlcoreError:
    return kind(what, where=where, fix=fix)


class ConfigError(RlcoreError):
    """A preset or an override is wrong; nothing has been run."""


class DataError(RlcoreError):
    """A row, a file or a dataset breaks its contract."""


class StorageError(RlcoreError):
    """The disk refuses, or an artifact does not match its digest."""


class ModelError(RlcoreError):
    """A model, a tokenizer or a chat template cannot be loaded or used."""


class CheckpointError(RlcoreError):
    """No intact checkpoint, or one that belongs to another run."""


class SamplingError(RlcoreError):
    """The rollout engine failed."""


class StaleSamplerError(SamplingError):
    """The rollout engine serves other weights than the learner's."""


class RewardError(RlcoreError):
    """The grader (not the answer) failed too often."""


class CallTimeoutError(RewardError):
    """Code that is not ours, such as a user's reward, did not come back in time; the run can go on later."""


class SandboxError(RlcoreError):
    """Untrusted programs cannot be isolated on this machine; nothing was run."""


class PromotionError(RlcoreError):
    """The registry's aliases are not as a promotion or a roll-back needs them; none was moved."""


class ServiceError(RlcoreError):
    """A server that runs need (PostgreSQL, Prefect, MLflow, a worker) does not start, or does not answer."""


class CanaryError(RlcoreError):
    """A run-time check found a silently broken run."""


class TrainingError(RlcoreError):
    """The update cannot go on."""


class NonFiniteError(TrainingError):
    """NaN or infinity where a finite number is needed; no optimizer step was taken."""


class LearnerLostError(TrainingError):
    """A process that learns died or fell silent; what it had is in the newest checkpoint."""
