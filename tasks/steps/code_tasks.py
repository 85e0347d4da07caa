"""Code tasks are run before they are trained on: a test that passes everything, or nothing, teaches nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rlcore.data_contracts.contracts.code_tasks import Trial, broken_tests
from rlcore.data_contracts.gate.row_rules import RowFilter
from rlcore.sandbox.base import ResourceLimits, RunResult, RunStatus
from rlcore.sandbox.pool import Job, SandboxPool

_LIMITS = ResourceLimits(wall_seconds=10.0, cpu_seconds=60)


@contextmanager
def test_suite_filter() -> Iterator[RowFilter]:
    """A look at references: reasons against tasks whose own solution fails, or whose tests a stub passes, in a sandbox.

    Raises:
        SandboxError: programs cannot be isolated on this machine.
    """
    with SandboxPool() as sandbox:
        yield lambda references: broken_tests(references, lambda trials: _failures(sandbox, trials))


def _failures(sandbox: SandboxPool, trials: Sequence[Trial]) -> list[str]:
    """Return the reason of each program's failure: the first test that it did not pass, and its outcome; empty if it
    passed.
    """
    jobs = [Job(reference=trial.reference, code=trial.code, limits=_LIMITS, stop_early=True) for trial in trials]
    # INFRA here is a row whose tests cannot be run at all: a sandbox that does not work has refused at its start.
    return [_failure(outcomes) for outcomes in sandbox.check_all(jobs)]


def _failure(outcomes: Sequence[RunResult]) -> str:
    for place, one in enumerate(outcomes):
        if one.status is not RunStatus.PASS:
            return f"test {place + 1} of {len(outcomes)}: {one.error or one.status}"
    return ""
