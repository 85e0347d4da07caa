"""Trial of code tasks before training: a task whose tests pass every program, or none, gives no signal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rlcore.data_contracts.contracts.code_tasks import Trial, broken_tests
from rlcore.data_contracts.gate.row_rules import RowFilter
from rlcore.sandbox.base import ResourceLimits, RunResult, RunStatus
from rlcore.sandbox.pool import Job, SandboxPool

_SHOWN = 80  # characters of a test
_LIMITS = ResourceLimits(wall_seconds=10.0, cpu_seconds=60)


@contextmanager
def test_suite_filter() -> Iterator[RowFilter]:
    """Return a row filter against tasks whose solution fails, or whose tests pass a stub, in a sandbox.

    Raises:
        SandboxError: programs cannot be isolated on this machine.
    """
    with SandboxPool() as sandbox:
        yield lambda references: broken_tests(references, lambda trials: _failures(sandbox, trials))


def _failures(sandbox: SandboxPool, trials: Sequence[Trial]) -> list[str]:
    jobs = [Job(reference=trial.reference, code=trial.code, limits=_LIMITS, stop_early=True) for trial in trials]
    # INFRA here is a row whose tests cannot run at all: a broken sandbox fails when it starts.
    return [
        _failure(trial.reference, outcomes) for trial, outcomes in zip(trials, sandbox.check_all(jobs), strict=True)
    ]


def _failure(reference: str, outcomes: Sequence[RunResult]) -> str:
    for place, one in enumerate(outcomes):
        if one.status is not RunStatus.PASS:
            return f"test {place + 1} of {len(outcomes)}, {_shown(reference, place)}: {one.error or one.status}"
    return ""


def _shown(reference: str, place: int) -> str:
    task = json.loads(reference, parse_int=lambda digits: int(digits[:_SHOWN]))  # long integers have no text
    test = task["tests"][place]
    name = "" if isinstance(test, str) else "input " if "input" in test else "args "
    text = " ".join(test.split()) if isinstance(test, str) else repr(test[name.strip()])
    return name + (text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")
