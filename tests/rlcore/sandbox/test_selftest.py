"""The self-test refuses a sandbox with a hole, and one that does not work at all."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from rlcore.errors import SandboxError
from rlcore.sandbox.base import ResourceLimits, RunResult, RunStatus
from rlcore.sandbox.selftest import self_test

PASSED, FAILED = RunResult(status=RunStatus.PASS), RunResult(status=RunStatus.FAIL)


class Scripted:
    """A sandbox that says what it is told to."""

    def __init__(
        self, succeeded: Sequence[str] = (), *, control: int = 42, loop: RunStatus = RunStatus.TIMEOUT
    ) -> None:
        self.report = RunResult(
            status=RunStatus.PASS, stdout=json.dumps({"control": control, "succeeded": list(succeeded)})
        )
        self.loop = RunResult(status=loop)
        self.fooled_by = ""
        self.is_lame = False

    def run(self, code: str, limits: ResourceLimits) -> RunResult:
        return self.loop if code.startswith("while") else self.report

    def check(self, reference: str, code: str, limits: ResourceLimits) -> list[RunResult]:
        passes = (code == "def double(x): return 2 * x" and not self.is_lame) or (
            bool(self.fooled_by) and self.fooled_by in code
        )
        return [PASSED if passes else FAILED] * 2


def test_a_sound_sandbox_passes() -> None:
    box = Scripted()
    self_test(box.run, box.check)


@pytest.mark.parametrize(
    ("box", "what"),
    [
        (Scripted(["fork", "network"]), "could fork, network"),
        (Scripted(control=0), "is not isolated"),
        (Scripted(loop=RunStatus.PASS), "endless loop was not stopped"),
    ],
)
def test_a_hole_is_named(box: Scripted, what: str) -> None:
    with pytest.raises(SandboxError, match=what):
        self_test(box.run, box.check)


@pytest.mark.parametrize("fragment", ["os._exit", "__eq__", "os.write", "return 42"])
def test_a_sandbox_that_can_be_fooled_is_refused(fragment: str) -> None:
    box = Scripted()
    box.fooled_by = fragment
    with pytest.raises(SandboxError, match="passed the tests"):
        self_test(box.run, box.check)


def test_a_sandbox_in_which_nothing_passes_proves_nothing() -> None:
    box = Scripted()
    box.is_lame = True
    with pytest.raises(SandboxError, match="a correct program failed"):
        self_test(box.run, box.check)
    box.report = RunResult(status=RunStatus.INFRA, error="no namespaces")
    with pytest.raises(SandboxError, match=r"(?s)no namespaces.*fix:"):
        self_test(box.run, box.check)
