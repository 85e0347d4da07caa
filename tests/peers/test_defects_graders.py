"""Known defects of graders: what follows an answer whose evaluation never ends, in processes that are killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.peers.conftest import Record

pytestmark = pytest.mark.peers

PROGRAM = Path(__file__).parent / "grader_programs.py"


def scores_of(name: str, *, seconds: float) -> list[float] | None:
    """The scores that the program prints; None where it has not ended by then. Its whole process group is killed."""
    environment = os.environ | {"PYTHONPATH": str(PROGRAM.parents[2])}
    command = [sys.executable, "-W", "ignore", str(PROGRAM), name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, start_new_session=True) as process:
        assert process.stdout is not None
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            output = b""
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    lines = [line for line in output.decode().splitlines() if line.startswith("[")]
    return json.loads(lines[-1]) if lines else None


def test_right_answers_are_graded_after_endless_ones(record: Record) -> None:
    ours = scores_of("ours-after-towers", seconds=60)
    assert ours == [1.0, 1.0]
    trls = scores_of("trl-in-a-thread", seconds=60)
    record(
        r"score of a right answer after \boxed{9^{9^9}}, off the main thread, 60 s",
        "trl",
        theirs="no verdict, the process hangs" if trls is None else str(trls),
        ours=str(ours),
        reproduced=trls != [1.0],
    )


def test_right_answers_are_graded_after_as_many_endless_ones_as_there_are_workers(record: Record) -> None:
    ours = scores_of("ours-after-towers", seconds=60)
    assert ours == [1.0, 1.0]
    verls = scores_of("verl-after-towers", seconds=240)
    record(
        r"scores of two right answers after four \boxed{9^{9^9}}, four warm workers, 30 s each",
        "verl",
        theirs="no verdict in 240 s" if verls is None else str(verls),
        ours=str(ours),
        reproduced=verls != [1.0, 1.0],
    )
