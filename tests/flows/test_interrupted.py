"""Ctrl-C as a terminal sends it, to all processes of a run: one line, and the next run ends with the same bytes.

That it ends within five seconds follows from ``PATIENCE`` (tests/tasks/run/test_processes.py); measured on two
quiet cores, of this run: 0.1 s inline, 1.3 s under Prefect, 3.8 s for SIGTERM under Prefect.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.flows.conftest import environment, flows_command
from tests.flows.homes import weights, without
from tests.waiting import LONG


def start(home: Path, engine: str) -> subprocess.Popen[str]:
    """A run in a process group of its own, as a shell starts it in a terminal."""
    variables = environment(home) | {"RLCORE_ENGINE": engine}
    command = flows_command("run")
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables, start_new_session=True
    )


def interrupt(process: subprocess.Popen[str], after: str, number: signal.Signals) -> list[str]:
    """Send a signal to the whole group after a line, and wait for the end: what the process said since."""
    assert process.stdout is not None
    for line in process.stdout:
        if after in line:
            break
    else:
        raise AssertionError(f"the run never said {after!r}")
    os.killpg(process.pid, number)
    process.wait(LONG)
    return process.stdout.readlines()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "number", "code"),
    [
        ("inline", signal.SIGINT, 130),
        ("prefect", signal.SIGINT, 130),
        ("prefect", signal.SIGTERM, 143),
    ],
)
def test_an_interrupted_run_ends_with_one_line_and_the_next_one_ends_with_the_same_bytes(
    micro_home: Path, tmp_path: Path, engine: str, number: signal.Signals, code: int
) -> None:
    home = without(micro_home, tmp_path / "home", "grpo")
    with start(home, engine) as first:
        said = interrupt(first, "grpo: iteration 2/4", number)
        assert first.returncode == code, said
    assert said[-1].startswith("interrupted; the same command resumes from iteration "), said
    assert said[-1].endswith(" of grpo\n")
    if number == signal.SIGINT:  # nothing but what was under way tells of anything
        assert [line for line in said[:-1] if "iteration" not in line or "Crash" in line] == []
        assert len(said) <= 3, said
    gone = int(said[-1].split()[-3])
    assert 2 <= gone <= 5
    assert not [each for each in psutil.process_iter(["environ"]) if belongs(each, home)]

    second = start(home, engine)
    output, _ = second.communicate(timeout=LONG)
    assert second.returncode == 0, output
    assert f"resume: after iteration {gone - 1} of 4" in output
    assert weights(home, "grpo") == weights(micro_home, "grpo")


def belongs(process: psutil.Process, home: Path) -> bool:
    """Return True if a process still works for a home."""
    is_dead = process.status() == psutil.STATUS_ZOMBIE
    return not is_dead and (process.info["environ"] or {}).get("RLCORE_HOME") == str(home)
