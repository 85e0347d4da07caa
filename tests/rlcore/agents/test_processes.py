"""Agents end, and with them everything that they started, whatever they do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from uuid import uuid4

import pytest

from rlcore.agents.processes import KEPT_BYTES, Agents, Ended
from rlcore.agents.program import Program
from rlcore.config import AgentConfig
from tests.rlcore.agents.programs import DAEMON, PROMPT, marked, play
from tests.rlcore.sandbox.conftest import require_bubblewrap
from tests.waiting import LONG, given_time, is_alive, until

RUN = """
from rlcore.agents.processes import Agents
from rlcore.agents.program import open_program
from rlcore.config import AgentConfig
from tests.rlcore.agents.programs import PROMPT

with open_program(AgentConfig(command=("python", "-c", {!r}), sandbox={})) as program, program.folder(PROMPT) as folder:
    Agents().run(program.command(folder), program.environment("", folder, ""), folder, seconds=600.0)
"""


def test_an_agent_that_ends_well_has_its_output_and_no_failure(tmp_path: Path) -> None:
    ended = play(tmp_path, "import sys; print('one'); print('two', file=sys.stderr)")
    assert (ended.code, ended.failure, sorted(ended.output.split())) == (0, "", ["one", "two"])
    assert list(tmp_path.iterdir()) == []  # of its working folder


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("1 / 0", "exit code 1; last output: ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "exit code 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "exit code 139 (SIGSEGV)"),
        ("import os; os.kill(os.getpid(), 40)", "exit code 168 (signal 40)"),
        ("import os, signal; os.kill(os.getppid(), signal.SIGKILL)", "its warden was ended by SIGKILL"),
    ],
)
def test_a_failure_has_its_reason(tmp_path: Path, code: str, failure: str) -> None:
    assert play(tmp_path, code).failure == failure


def test_a_command_that_is_not_there_is_a_failure(tmp_path: Path) -> None:
    made = Program(config=AgentConfig(command=("no-such-program",), sandbox=False), room=tmp_path)
    with made.folder(PROMPT) as folder:
        ended = Agents().run(made.command(folder), {"PATH": os.defpath}, folder, seconds=LONG)
    reason = "the command cannot be started: No such file or directory: no-such-program"
    assert ended.failure == f"exit code 127; last output: {reason}"


@pytest.mark.parametrize("then", ["pass", "raise SystemExit(1)", "time.sleep(600)"])
def test_a_daemon_without_session_environment_and_parent_ends_with_its_agent(tmp_path: Path, then: str) -> None:
    code = DAEMON.format(then=then)
    ended = given_time(
        lambda seconds: play(tmp_path, code, seconds=seconds), lambda made: "daemon" in made.output, seconds=2.0
    )
    _, pid = ended.output.split()
    assert not is_alive(int(pid))


def test_a_family_that_forks_on_and_on_is_ended(tmp_path: Path) -> None:
    code = """
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for _ in range(6):  # 64 processes
            if not os.fork():
                os.setsid()
            os.write(1, b"%d\\n" % os.getpid())
        time.sleep(600)
    """
    ended = given_time(
        lambda seconds: play(tmp_path, code, seconds=seconds),
        lambda made: len(set(made.output.split())) == 64,
        seconds=1.0,
    )
    pids = set(map(int, ended.output.split()))
    assert len(pids) == 64 and not [pid for pid in pids if is_alive(pid)]


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
        threading.Thread(target=lambda code=code: found.append(play(tmp_path, code, agents=agents, seconds=LONG)))
        for code in codes
    ]
    for thread in threads:
        thread.start()
    until(lambda: all(path.exists() for path in started))
    agents.end()
    for thread in threads:
        thread.join(LONG)
    assert [each.code for each in found] == [None] * 3
    assert play(tmp_path, "print('late')", agents=agents).failure == "the run ended before it began"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize(("sandbox", "count"), [(False, 4), (True, 5)])
def test_if_the_run_is_killed_agent_and_daemon_end(sandbox: bool, count: int, number: signal.Signals) -> None:
    if sandbox:
        require_bubblewrap()
    mark = uuid4().hex  # in the command lines of the run, its warden, the agent, the daemon, and bubblewrap
    agent = f"# {mark}\n" + DAEMON.format(then="time.sleep(600)")
    run = subprocess.Popen([sys.executable, "-c", RUN.format(agent, sandbox)], cwd=Path(__file__).parents[3])
    try:
        until(lambda: len(marked(mark)) >= count)
    finally:
        os.kill(run.pid, number)
        run.wait()
    until(lambda: not marked(mark))
