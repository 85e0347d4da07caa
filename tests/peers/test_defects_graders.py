"""Known defects of graders: what follows an answer whose evaluation never ends, in processes that are killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.peers.conftest import Record

pytestmark = pytest.mark.peers

PROGRAM = Path(__file__).parent / "grader_programs.py"


def scores_of(name: str, *, seconds: float) -> list[float | None] | None:
    """The scores of endless answers and of right ones after them; None where there are none after ``seconds``.

    Right answers must have been graded before, or the machine is too slow to say anything. The whole process group is
    killed.
    """
    environment = os.environ | {"PYTHONPATH": str(PROGRAM.parents[2])}
    command = [sys.executable, "-W", "ignore", str(PROGRAM), name]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.DEVNULL, env=environment, start_new_session=True
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        output.seek(0)
        before, *after = [json.loads(line) for line in output if line.startswith(b"[")]
    assert set(before) == {1.0}
    return after[0] if after else None


def test_right_answers_are_graded_after_an_endless_one(record: Record) -> None:
    ours = scores_of("ours-after-towers", seconds=120)
    assert ours is not None
    assert ours[4:] == [1.0, 1.0]
    trls = scores_of("trl-in-a-thread", seconds=120)
    record(
        r"a right answer after \boxed{9^{9^9}}, off the main thread",
        "trl",
        theirs="no verdict in 120 s" if trls is None else str(trls[1:]),
        ours=str(ours[-1:]),
        reproduced=trls is None,
    )


def test_right_answers_are_graded_after_as_many_endless_ones_as_there_are_workers(record: Record) -> None:
    verls = scores_of("verl-after-towers", seconds=600)
    assert verls is not None
    record(
        r"two right answers after four \boxed{9^{9^9}}, with four workers",
        "verl",
        theirs=str(verls[4:]),
        ours="[1.0, 1.0] (test above)",
        reproduced=verls[4:] != [1.0, 1.0],
    )
