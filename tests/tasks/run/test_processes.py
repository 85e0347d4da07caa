"""The process of a run: signals that end it, output that nobody reads, and tasks with and without Prefect."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefect import flow
from prefect.server.api.server import SubprocessASGIServer
from prefect.settings import PREFECT_API_URL, Settings, temporary_settings

from rlcore.errors import ServiceError, TrainingError
from rlcore.tasks.run import interrupts
from rlcore.tasks.run.interrupts import end_interrupted, interrupt_message, interruptible, track_stage
from rlcore.tasks.run.prefect_bridge import (
    call_flow,
    current_flow_run,
    report_markdown,
    report_progress,
    stage_logger,
    task,
)
from rlcore.tasks.store.settings import Home
from tests.waiting import LONG, until_ended

SLEEPER = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"]
RUN = """
import subprocess, sys, time
from pathlib import Path
from rlcore.tasks.run import interrupts
interrupts.PATIENCE = 0.1
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
    _, words = process.communicate(timeout=LONG)
    assert words == "interrupted; the same command resumes from iteration 12 of grpo\n"
    assert process.returncode == code
    until_ended([child.pid])  # a killed process takes a moment to be gone


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_process_and_its_children(tmp_path: Path, number: signal.Signals, code: int) -> None:
    process, child = started(tmp_path, "pass")
    process.send_signal(number)
    assert_ended(process, child, code)


def test_what_does_not_end_by_itself_is_left_behind_after_a_while(tmp_path: Path) -> None:
    assert interrupts.PATIENCE <= 4.0
    process, child = started(tmp_path, "time.sleep(600)")
    process.send_signal(signal.SIGINT)
    assert_ended(process, child, 130)


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    process, child = started(tmp_path, "interrupts.PATIENCE = 600; print('tidying up', flush=True); time.sleep(600)")
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "tidying up\n"
    process.send_signal(signal.SIGINT)
    assert_ended(process, child, 130)


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


def test_the_embedded_server_registers_no_blocks_and_gets_no_sigint(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PREFECT_SERVER_REGISTER_BLOCKS_ON_START", "PREFECT_SERVER_MEMOIZE_BLOCK_AUTO_REGISTRATION"):
        monkeypatch.delenv(name, raising=False)  # and restore it
    started: list[tuple[Any, str]] = []

    def start(_: SubprocessASGIServer) -> None:
        status = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True, check=True).stdout
        (mask,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigBlk")]
        started.append((Settings().server, mask))

    monkeypatch.setattr(SubprocessASGIServer, "start", start)
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        interrupts.start_prefect_server()
    ((server, mask),) = started
    assert not server.register_blocks_on_start
    assert not server.memoize_block_auto_registration
    assert int(mask, 16) >> (signal.SIGINT - 1) & 1
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


SAYS = """
import logging, sys
from pathlib import Path
from prefect.logging.configuration import setup_logging
setup_logging()
for number in range(3):
    logging.getLogger("run").critical("line %d", number)
print("printed", flush=True)
print("printed", file=sys.stderr, flush=True)
Path(sys.argv[1]).touch()
"""


def test_a_run_goes_on_when_nobody_reads_its_output(tmp_path: Path) -> None:
    handler = "rlcore.tasks.run.worker_output.WorkerOutput"
    variables = os.environ | {"PREFECT_LOGGING_HANDLERS_CONSOLE_CLASS": handler}
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", SAYS, str(tmp_path / "end")]
    status = subprocess.run(command, env=variables, stdout=write, stderr=write, check=False).returncode
    os.close(write)
    assert (status, (tmp_path / "end").exists()) == (0, True)


@task(name="iteration", run_name="iteration {number}")
def iterate(done: list[int], number: int, rate: float = 0.5) -> float:
    done.append(number)
    return rate * number


@task(name="burn")
def burn() -> None:
    raise TrainingError("the machine burns", where="here")


@flow(name="toy-inline", persist_result=False)
def toy_flow(fail: bool = False) -> dict[str, Any]:
    done: list[int] = []
    total = iterate(done, 1) + iterate(done, number=2)
    report_progress("iterations", 2, 2)
    report_markdown("summary", "# Done")
    if fail:
        burn()
    return {"done": done, "total": total, "run": current_flow_run()}


def test_inline_a_task_is_its_function_and_a_flow_too(home: Home) -> None:
    assert call_flow(toy_flow) == {"done": [1, 2], "total": 1.5, "run": None}
    with pytest.raises(TrainingError, match="the machine burns"):
        call_flow(toy_flow, fail=True)


def test_a_log_line_of_another_thread_is_on_the_page_of_its_stage() -> None:
    """Prefect puts a line on the page of the flow run that the thread's context has."""
    run: ContextVar[str] = ContextVar("run", default="")
    words = list[tuple[str, str]]()

    class Page(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            words.append((run.get(), record.getMessage()))

    logger = logging.Logger("pages")
    logger.addHandler(Page())
    run.set("mine")
    say = stage_logger(logger, "grpo")
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(say, map(str, range(20))))
    assert sorted(words) == sorted(("mine", f"grpo: {number}") for number in range(20))


def test_tasks_stages_and_lineage_import_neither_prefect_nor_mlflow_nor_torch(home: Home) -> None:
    # Two read their settings when they are imported, and all cost seconds: no inline run may pay for Prefect.
    code = """
import sys, rlcore.tasks.run.pipeline, rlcore.tasks.tracking.lineage
from rlcore.tasks.run.prefect_bridge import report_markdown, report_progress, task
@task(name="t", run_name="t {x}")
def t(x): return x + 1
report_progress("p", 1, 2); report_markdown("t", "text")
assert t(1) == 2
print([name for name in ("prefect", "mlflow", "torch") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/api", "nonsense"])
def test_a_server_that_is_away_is_one_error(url: str, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCORE_ENGINE", "prefect")
    with temporary_settings({PREFECT_API_URL: url}), pytest.raises(ServiceError) as caught:
        call_flow(toy_flow)
    assert caught.value.where == f"PREFECT_API_URL={url}"
    assert "make services" in caught.value.fix
