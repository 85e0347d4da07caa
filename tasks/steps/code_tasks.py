"""Code tasks are run before they are trained on: a test that passes everything, or nothing, teaches nothing."""

from __future__ import annotations

from collections.abc import Sequence

from data_contracts.code_tasks import Trial, broken_tests
from data_contracts.convert import reject_rows
from data_contracts.gate import Candidates
from rlcore.sandbox.base import Limits, Verdict
from rlcore.sandbox.pool import Job, SandboxPool

_LIMITS = Limits(wall_seconds=10.0, cpu_seconds=60)


def without_broken_tests(candidates: Candidates) -> Candidates:
    """The candidates without tasks whose own solution fails, or whose tests a stub passes, in the sandbox.

    Raises:
        SandboxError: programs cannot be isolated on this machine.
    """
    with SandboxPool() as sandbox:
        reasons = broken_tests(candidates.frame["reference"].tolist(), lambda trials: _passes(sandbox, trials))
    return reject_rows(candidates, reasons, field="reference")


def _passes(sandbox: SandboxPool, trials: Sequence[Trial]) -> list[bool]:
    jobs = [Job(reference=trial.reference, code=trial.code, limits=_LIMITS, stop_early=True) for trial in trials]
    # INFRA here is a row whose tests cannot be run at all: a sandbox that does not work has refused at its start.
    return [all(one.verdict is Verdict.PASS for one in outcome) for outcome in sandbox.check_all(jobs)]
