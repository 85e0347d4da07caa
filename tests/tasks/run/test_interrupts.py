"""Signals to a process of its own: how it ends, what it says, and what it leaves behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefect.server.api.server import SubprocessASGIServer
from prefect.settings import PREFECT_API_URL, Settings, temporary_settings

from rlcore.tasks.run import interrupts
from rlcore.tasks.run.interrupts import (
    end_interrupted,
    interrupt_message,
    interruptible,
    track_stage,
)
from tests.waiting import LONG, until_ended

SLEEPER = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"]
RUN = """
import subprocess, sys, time
from pathlib import Path
from rlcore.tasks.run import interrupts
interrupts.PATIENCE = 0.5
child = subprocess.Popen({sleeper!r})
try:
    with interrupts.interruptible(), interrupts.track_stage("grpo", Path({work!r})):
        try:
            print(child.pid, flush=True)
            time.sleep(600)
        finally:
            {finish}
except KeyboardInterrupt as error:
    interrupts.end_interrupted(error)
"""


def started(tmp_path: Path, finish: str) -> tuple[subprocess.Popen[str], psutil.Process]:
    """A process that is in a stage of two checkpoints, and its child, which takes no SIGTERM."""
    for step in (2, 11):
        (tmp_path / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    code = RUN.format(sleeper=SLEEPER, work=str(tmp_path), finish=finish)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, psutil.Process(int(process.stdout.readline()))


def assert_ended(process: subprocess.Popen[str], child: psutil.Process, code: int) -> None:
    """It ends as it should: with its last words alone, and with no child left."""
    _, said = process.communicate(timeout=LONG)
    assert said == "interrupted; the same command resumes from iteration 12 of grpo\n"
    assert process.returncode == code
    until_ended([child.pid])  # a killed process takes a moment to be gone


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_process_with_one_line_and_its_children(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    process, child = started(tmp_path, "pass")
    process.send_signal(number)
    assert_ended(process, child, code)


def test_what_does_not_end_by_itself_is_left_behind_after_a_while(tmp_path: Path) -> None:
    process, child = started(tmp_path, "time.sleep(600)")
    process.send_signal(signal.SIGINT)
    assert_ended(process, child, 130)


def test_a_signal_is_obeyed_within_five_seconds_whatever_does_not_end() -> None:
    assert interrupts.PATIENCE + interrupts._GRACE_SECONDS <= 4.0


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    process, child = started(tmp_path, "interrupts.PATIENCE = 600; print('tidying up', flush=True); time.sleep(600)")
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "tidying up\n"
    process.send_signal(signal.SIGINT)
    assert_ended(process, child, 130)


def test_a_server_that_is_started_here_has_the_signal_of_the_terminal_blocked() -> None:
    code = """
import signal, subprocess, sys
from rlcore.tasks.run import interrupts
from rlcore.tasks.run.interrupts import _with_sigint_blocked
class Server:
    def start(self):
        status = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True).stdout
        (mask,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigBlk")]
        print(bool(int(mask, 16) >> (signal.SIGINT - 1) & 1))
import threading
thread = threading.Thread(target=_with_sigint_blocked, args=(Server(),)); thread.start(); thread.join()
print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_the_last_words_name_the_stage_that_was_under_way_and_no_other(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), interruptible():
        with track_stage("sft", tmp_path):
            pass
        with pytest.raises(ValueError, match="burnt"), track_stage("reward_model", tmp_path):
            raise ValueError("burnt")
        assert interrupt_message() == "interrupted; the same command resumes unfinished stages"
        with track_stage("grpo", tmp_path):
            assert interrupt_message() == "interrupted; the same command resumes from the beginning of grpo"
            raise KeyboardInterrupt


def test_a_command_that_does_not_go_on_later_promises_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with interruptible():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert end_interrupted(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_the_embedded_server_imports_no_collection_to_register_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in interrupts._NO_BLOCKS:
        monkeypatch.delenv(name, raising=False)  # and restore it
    started: list[Any] = []
    monkeypatch.setattr(SubprocessASGIServer, "start", lambda _: started.append(Settings().server))
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        interrupts.start_prefect_server()
    (server,) = started
    assert not server.register_blocks_on_start
    assert not server.memoize_block_auto_registration
