"""The live view on a real terminal (a pty), the plain lines without one, and what its parts draw."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from rlcore.tasks.pipeline.live_view import bar, duration, sparkline

PROGRAM = """
import logging, sys, time
from rlcore.tasks.pipeline.prefect_bridge import report_progress
from rlcore.tasks.pipeline.live_view import live_view
handler = logging.StreamHandler(sys.stderr)
logging.getLogger("rlcore").addHandler(handler)
logging.getLogger("rlcore").setLevel(logging.INFO)
with live_view():
    for number in range(1, 4):
        metrics = {"reward/mean": 0.25 * number, "completion/truncated": 0.04, "tokens_per_second": 1234.0}
        report_progress("grpo iterations", number, 4, metrics)
        logging.getLogger("rlcore.tasks.kinds.rl.step").info("iteration %d is done", number)
        time.sleep(0.6)
logging.getLogger("rlcore").info("after the view")
"""
ROOT = Path(__file__).resolve().parents[3]


def run_on_terminal() -> str:
    """Return a program's output if standard error is a terminal of 120 columns."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "30"}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stderr=theirs, cwd=ROOT, env=environment)
    os.close(theirs)
    written = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # the other end is closed: Linux says so with EIO
            break
        if not chunk:
            break
        written += chunk
    os.close(ours)
    assert process.wait(60) == 0
    return written.decode()


def test_a_terminal_shows_progress_speed_reward_and_the_time_left_below_the_lines() -> None:
    screen = run_on_terminal()
    for part in ("grpo iterations", "3/4", "reward 0.750", "truncated 4%", "1,234 tokens/s", "▁", "█", "left", "\x1b["):
        assert part in screen, part
    for line in ("iteration 1 is done", "iteration 2 is done", "iteration 3 is done", "after the view"):
        assert screen.count(line) == 1


def test_without_a_terminal_there_are_the_plain_lines_alone() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stderr.splitlines() == [*(f"iteration {number} is done" for number in (1, 2, 3)), "after the view"]
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("values", "blocks"),
    [
        ([], ""),
        ([3.0], "▁"),
        ([0.0, 1.0, 2.0], "▁▅█"),  # 0.5 * 7 = 3.5 rounds to the even block 4
        (list(range(30)), None),
    ],
)
def test_a_sparkline_scales_its_last_values(values: list[float], blocks: str | None) -> None:
    drawn = sparkline(values)
    assert drawn == blocks if blocks is not None else (len(drawn), drawn[0], drawn[-1]) == (24, "▁", "█")


def test_a_bar_and_a_duration() -> None:
    assert bar(1, 2) == "━" * 12 + "─" * 12
    assert [duration(seconds) for seconds in (45.2, 200.0, 7500.0)] == ["45 s", "3:20", "2:05:00"]
