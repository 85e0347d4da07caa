"""Agents end, and with them everything that they started, whatever they do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rlcore.agents.processes import Agents, Ended
from rlcore.agents.program import Program
from rlcore.agents.warden import KEPT_BYTES
from rlcore.config import AgentConfig
from tests.rlcore.agents.programs import DAEMON, is_alive, play, wait_for

RUN = "from pathlib import Path; from tests.rlcore.agents.programs import play; play(Path({!r}), {!r})"


def test_an_agent_that_ends_well_has_its_output_and_no_failure(tmp_path: Path) -> None:
    ended = play(tmp_path, "import sys; print('one'); print('two', file=sys.stderr)")
    assert (ended.code, ended.failure, sorted(ended.output.split())) == (0, "", ["one", "two"])
    assert list(tmp_path.iterdir()) == []  # of its working folder


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("1 / 0", "exit code 1; last output: ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "exit code 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV"),
        ("import os; os.kill(os.getpid(), 40)", "ended by signal 40"),
        ("import os, signal; os.kill(os.getppid(), signal.SIGKILL)", "killed together with its warden"),
    ],
)
def test_a_failure_has_its_reason(tmp_path: Path, code: str, failure: str) -> None:
    assert play(tmp_path, code).failure == failure


def test_a_command_that_is_not_there_is_a_failure(tmp_path: Path) -> None:
    made = Program(config=AgentConfig(command=("no-such-program",)), url="http://a:1/v1", room=tmp_path)
    with made.folder() as folder:
        ended = Agents().run(made.command(folder), {"PATH": os.defpath}, folder, seconds=30.0)
    assert ended.failure == "the command cannot be started: No such file or directory: no-such-program"


def test_an_agent_that_hangs_and_ignores_signals_is_ended_in_time(tmp_path: Path) -> None:
    code = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; print('up', flush=True)"
    began = time.monotonic()
    ended = play(tmp_path, f"{code}; time.sleep(600)", seconds=1.0)
    assert time.monotonic() - began < 20.0
    assert ended.is_late
    assert ended.failure == "timed out after 1 s; last output: up"


def test_an_agent_that_stops_its_warden_is_ended_in_time(tmp_path: Path) -> None:
    code = "import os, signal, time; print(os.getpid()); os.kill(os.getppid(), signal.SIGSTOP); time.sleep(600)"
    began = time.monotonic()
    ended = play(tmp_path, code, seconds=1.0)
    assert time.monotonic() - began < 20.0
    assert ended.is_late
    assert not is_alive(int(ended.output))


@pytest.mark.parametrize("then", ["pass", "raise SystemExit(1)", "time.sleep(600)"])
def test_a_daemon_without_session_environment_and_parent_ends_with_its_agent(tmp_path: Path, then: str) -> None:
    ended = play(tmp_path, DAEMON.format(then=then), seconds=2.0)
    _, pid = ended.output.split()
    assert not is_alive(int(pid))


def test_a_family_that_forks_on_and_on_is_ended(tmp_path: Path) -> None:
    code = """
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for _ in range(6):  # 64 processes
            if not os.fork():
                os.setsid()
            print(os.getpid(), flush=True)
        time.sleep(600)
    """
    ended = play(tmp_path, code, seconds=1.0)
    assert len(pids := set(map(int, ended.output.split()))) >= 32
    assert not [pid for pid in pids if is_alive(pid)]


def test_of_a_flood_of_output_the_end_is_kept(tmp_path: Path) -> None:
    ended = play(tmp_path, "print('x' * (20 << 20)); print('end')")
    assert ended.code == 0
    assert len(ended.output) <= KEPT_BYTES
    assert ended.output.endswith("x\nend\n")


def test_all_agents_can_be_ended_and_none_starts_afterwards(tmp_path: Path) -> None:
    agents, found = Agents(), list[Ended]()
    started = [tmp_path / f"started-{number}" for number in range(3)]
    codes = [f"import time; open({str(path)!r}, 'w'); time.sleep(600)" for path in started]
    threads = [
        threading.Thread(target=lambda code=code: found.append(play(tmp_path, code, agents=agents, seconds=60.0)))
        for code in codes
    ]
    for thread in threads:
        thread.start()
    wait_for(lambda: all(path.exists() for path in started))
    agents.end()
    for thread in threads:
        thread.join(20.0)
    assert [each.code for each in found] == [None] * 3
    assert play(tmp_path, "print('late')", agents=agents).failure == "the run ended before it began"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_if_the_run_is_killed_agent_and_daemon_end(tmp_path: Path, number: signal.Signals) -> None:
    agent = DAEMON.format(then=f"open({str(tmp_path / 'pids')!r}, 'w').write(f'{{os.getpid()}}'); time.sleep(600)")
    code = RUN.format(str(tmp_path), agent)
    run = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[3])
    try:
        wait_for(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text().isdigit())
        pids = [int((tmp_path / "pids").read_text()), *(int(path.read_text()) for path in tmp_path.glob("*/pid"))]
        assert len(pids) == 2
        assert all(map(is_alive, pids))
    finally:
        os.kill(run.pid, number)
        run.wait()
    wait_for(lambda: not any(map(is_alive, pids)))
