"""The live view on a real terminal (a pty), the plain lines without one, and what its parts draw."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rlcore import progress
from rlcore.models.loading import load_policy
from rlcore.sampling.base import SamplingParams
from rlcore.sampling.native import NativeSampler
from rlcore.tasks.run.live_view import RunState
from rlcore.tasks.run.prefect_bridge import report_progress
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import FailedRollout, Message, Prompt, Rollout
from tests.chat_models import make_checkpoint
from tests.waiting import LONG

PROGRAM = """
import logging, sys, time
from rlcore import progress
from rlcore.tasks.run import live_view
from rlcore.tasks.run.prefect_bridge import report_progress
live_view.PLAIN_SECONDS, live_view.REDRAWS = 0.05, 40.0
draws = []
def counted(draw):
    return lambda view: (draw(view), draws.append(draw))[0]
live_view.RunState.rows, live_view.RunState.line = map(counted, (live_view.RunState.rows, live_view.RunState.line))
def until_drawn():
    seen = len(draws) + 2  # the next may have begun already
    while len(draws) < seen:
        time.sleep(0.01)
handler = logging.StreamHandler(sys.stderr)
logging.getLogger("rlcore").addHandler(handler)
logging.getLogger("rlcore").setLevel(logging.INFO)
with live_view.live_view():
    progress.begin("grpo", scope="stage")
    report_progress("grpo iterations", 0, 4)
    progress.begin("rollout")
    for number in range(1, 9):
        progress.advance("answers", number, 9, tokens=50 * number)
    until_drawn()
    progress.advance("answers", 9, 9)
    progress.begin("score")
    until_drawn()
    for number in range(1, 4):
        metrics = {"reward/mean": 0.25 * number, "completion/truncated": 0.04, "tokens_per_second": 1234.0}
        report_progress("grpo iterations", number, 4, metrics)
        logging.getLogger("rlcore.tasks.kinds.rl.step").info("iteration %d is done", number)
        until_drawn()
logging.getLogger("rlcore").info("after the view")
report_progress("nobody listens", 1, 2)
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
        except OSError:  # the other end is closed: EIO on Linux
            break
        if not chunk:
            break
        written += chunk
    os.close(ours)
    assert process.wait(LONG) == 0
    return written.decode()


def test_a_terminal_shows_progress_speed_reward_and_the_time_left_below_the_lines() -> None:
    screen = run_on_terminal()
    for part in ("grpo iterations", "3/4", "reward 0.750", "truncated 4%", "1,234 tokens/s", "━", "left", "\x1b["):
        assert part in screen, part
    for part in ("0/4", "grpo rollout", "/9 answers"):  # before the first iteration is done
        assert part in screen[: screen.index("iteration 1 is done")], part
    for line in ("iteration 1 is done", "iteration 2 is done", "iteration 3 is done", "after the view"):
        assert screen.count(line) == 1


def test_without_a_terminal_there_are_plain_lines_and_progress_now_and_then() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=ROOT, check=True)
    lines = done.stderr.splitlines()
    first = [line.removeprefix("grpo iterations 0/4: ") for line in lines if "0/4" in line]
    assert any(re.fullmatch(r"rollout: answers .*tokens/s, .* left", line) for line in first)
    assert re.fullmatch(r"score: \d+ s so far", first[-1])  # while a judge scores, nothing advances
    assert [line for line in lines if ": " not in line] == [
        *(f"iteration {number} is done" for number in (1, 2, 3)),
        "after the view",
    ]
    assert done.stdout == ""


@pytest.fixture
def state() -> Iterator[RunState]:
    """A view that listens, without a terminal."""
    made = RunState()
    progress.logger.addHandler(made)
    progress.logger.setLevel("DEBUG")
    yield made
    progress.logger.removeHandler(made)
    progress.logger.setLevel("NOTSET")


def test_a_new_stage_forgets_the_loop_and_a_finished_part_is_not_shown(state: RunState) -> None:
    progress.begin("grpo", scope="stage")
    report_progress("grpo iterations", 1, 3)
    progress.begin("update")
    progress.advance("minibatches", 1, 2, fraction=0.75)
    assert state.line() == "grpo iterations 1/3: update: minibatches 1/2, 75%"
    progress.advance("minibatches", 2, 2)
    assert state.line() == "grpo iterations 1/3: update: 0 s so far"
    progress.begin("evaluate_grpo", scope="stage")
    progress.advance("answers", 3, 10)
    assert state.line() == "evaluate_grpo: answers 3/10, 30%"
    assert len(state.rows()) == 1
    report_progress("steps", 3, 3)
    assert state.line() == "evaluate_grpo: 0 s so far"  # what follows the last step
    assert not state.is_idle
    progress.end_stage()
    assert state.is_idle


def test_samples_are_the_same_whether_somebody_looks_or_not(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "toy")
    tokenizer = ChatTokenizer.load(checkpoint)
    prompts = [
        Prompt(prompt_id=text, messages=turn, token_ids=tokenizer.render_prompt(turn), reference="", task="sums")
        for text in ("1", "12+30-7", "3+4")
        for turn in [(Message(role="user", content=text),)]
    ]
    params = SamplingParams(temperature=1.0, max_new_tokens=12, num_samples=4)

    def sampled() -> list[list[Rollout | FailedRollout]]:
        model = load_policy(checkpoint, device=torch.device("cpu"), dtype=torch.float32)
        return NativeSampler(model, tokenizer, max_concurrent=5).sample(prompts, params, seed=1)

    alone, seen = sampled(), RunState()
    records: list[progress.Progress] = []
    seen.emit = lambda record: records.append(record.progress)  # type: ignore[method-assign, attr-defined]
    progress.logger.addHandler(seen)
    progress.logger.setLevel("DEBUG")
    try:
        assert sampled() == alone
    finally:
        progress.logger.removeHandler(seen)
        progress.logger.setLevel("NOTSET")
    fractions, tokens = [each.fraction for each in records], [each.metrics.get("tokens", 0.0) for each in records]
    assert {(each.label, each.total) for each in records} == {("answers", 12)}
    assert fractions == sorted(fractions) and fractions[-1] == 1.0 and records[-1].done == 12
    assert max(tokens) == sum(
        len(item.completion_ids) for group in alone for item in group if isinstance(item, Rollout)
    )
