"""The program of an agent and its processes: its folder, task and sandbox, and that all ends with it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from rlcore.agents import program as programs
from rlcore.agents.gateway import Gateway
from rlcore.agents.program import KEPT_BYTES, Agents, Ended, Program, open_program
from rlcore.config import AgentConfig
from rlcore.errors import DataError, SandboxError
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Message
from tests.rlcore.agents.engines import Parrot
from tests.rlcore.agents.gateways import LIMITS
from tests.rlcore.agents.programs import DAEMON, PROMPT, URL, marked, play, run
from tests.rlcore.sandbox.conftest import require_bubblewrap
from tests.waiting import LONG, given_time, is_alive, until

SHOWN = "import json, os; print(json.dumps([dict(os.environ), sorted(os.listdir()), json.load(open('task.json'))]))"

ROW = dataclasses.replace(PROMPT, columns=json.dumps({"answer": "7", "repo": "r"}))


def plain(*command: str, **settings: Any) -> AgentConfig:
    return AgentConfig(command=command, sandbox=False, **settings)


def test_an_agent_reads_its_task_and_key_and_nothing_else_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "mine")
    (tmp_path / "helper.txt").write_text("x")
    files = (str(tmp_path / "helper.txt"),)
    config = plain("python", "-c", SHOWN, files=files, env={"MODE": "fast"}, columns=("repo",))
    with open_program(config) as program:
        environment, files, task = json.loads(run(program, ROW).output)
    assert files == ["helper.txt", "task.json"]
    assert (
        task
        == json.loads(environment.pop("RLCORE_TASK"))
        == {
            "prompt_id": "p",
            "task": "t",
            "messages": [{"role": "user", "content": "hi"}],
            "columns": {"repo": "r"},
        }
    )
    assert environment.pop("HOME") == environment.pop("TMPDIR") != str(Path.home())
    expected = {
        "OPENAI_BASE_URL": URL,
        "OPENAI_API_KEY": "secret",
        "MODE": "fast",
        "LANG": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
    }
    ours = {name: value for name, value in environment.items() if name not in ("PATH", "LC_CTYPE", "LD_LIBRARY_PATH")}
    assert ours == expected


def test_a_task_that_no_environment_variable_can_hold_is_in_the_file() -> None:
    long = dataclasses.replace(PROMPT, messages=(Message(role="user", content="a\udc80" * 200_000),))
    code = "import os; print(os.path.getsize('task.json') > 1_000_000, 'RLCORE_TASK' in os.environ)"
    with open_program(plain("python", "-c", code)) as program:
        assert run(program, long).output.split() == ["True", "False"]


def test_each_episode_has_a_folder_of_its_own_that_goes_with_it() -> None:
    with open_program(plain("true")) as program:
        with program.folder(PROMPT) as one, program.folder(PROMPT) as other:
            assert one != other
            (one / "deep").mkdir()
            (one / "deep" / "file").write_text("x")
        assert not one.exists() and not other.exists()
        room = program.room
    assert not room.exists()


def test_a_folder_that_cannot_be_removed_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("immutable")

    with open_program(plain("true")) as program:
        monkeypatch.setattr(shutil, "rmtree", refuse)
        assert run(program).failure == ""


def test_a_file_that_is_not_there_is_named() -> None:
    config = plain("x", files=("gone.py",))
    with open_program(config) as program, pytest.raises(DataError, match=r"gone\.py"), program.folder(PROMPT):
        pass


@pytest.mark.parametrize("sandbox", [False, True])
def test_a_folder_is_copied_with_its_links_and_rights(tmp_path: Path, sandbox: bool) -> None:
    if sandbox:
        require_bubblewrap()
    tools = tmp_path / "tools"
    (tools / "deep").mkdir(parents=True)
    (tools / "deep" / "run.sh").write_text(
        "#!/bin/sh\nreadlink tools/link; cat tools/link/run.sh | wc -l; ls tools/deep\n"
    )
    (tools / "deep" / "run.sh").chmod(0o755)
    (tools / "link").symlink_to("deep")
    config = AgentConfig(command=("tools/deep/run.sh",), files=(str(tools),), sandbox=sandbox)
    with open_program(config) as program:
        assert run(program).output == "deep\n2\nrun.sh\n"


def test_a_folder_that_is_too_large_to_copy_is_refused_with_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "MAX_FILES", 2)
    for name in "abc":
        (tmp_path / name).write_text("x")
    with (
        pytest.raises(DataError, match=r"0 MiB in 3 files or more \(limits 512 MiB and 2\)"),
        open_program(plain("x", files=(str(tmp_path),))),
    ):
        pass


SEEN = """
import os, pathlib, socket, urllib.error, urllib.request
def reach(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5)
        return True
    except OSError:
        return False
try:
    urllib.request.urlopen(os.environ["OPENAI_BASE_URL"] + "/models", timeout=600)
except urllib.error.HTTPError as error:
    print(error.code, "invalid_api_key" in error.read().decode())
print([os.path.exists(path) for path in {paths!r}], reach({port}), os.listdir({room!r}), open({shown!r}).read())
pathlib.Path("/usr/x").touch()
"""


def test_in_the_sandbox_an_agent_reaches_the_gateway_and_no_other_file_port_or_folder(
    tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    require_bubblewrap()
    secret, shown, file = tmp_path / "secret", tmp_path / "shown", tmp_path / "agent.py"
    for path in (secret, shown, file):
        path.write_text(path.name)
    config = AgentConfig(command=("python", "agent.py"), files=(str(file),), sandbox_read=(str(shown),))
    with (
        open_program(config) as program,
        program.folder(PROMPT) as other,
        socket.create_server(("127.0.0.1", 0)) as own,
    ):
        names = {"paths": [str(secret), __file__, str(other)], "port": own.getsockname()[1], "room": str(program.room)}
        file.write_text(SEEN.format(**names, shown=str(shown)))
        with Gateway(Parrot(tokenizer), tokenizer, LIMITS, temperature=1.0, seed=0, socket=program.socket):
            ended = run(program)
    lines = ended.output.splitlines()
    assert lines[0] == "401 True"
    assert re.fullmatch(r"\[False, False, False\] False \['tmp\w+'\] shown", lines[1])
    assert "Read-only file system: '/usr/x'" in lines[-1]
    assert ended.code == 1


@pytest.mark.parametrize("program", [("python", "-c", "import json, ssl, sqlite3"), ("node", "-e", "fetch; 1")])
def test_in_the_sandbox_an_interpreter_works_within_its_limits(program: tuple[str, ...]) -> None:
    require_bubblewrap()
    if shutil.which(program[0]) is None:
        pytest.skip(f"{program[0]} is not installed")
    with open_program(AgentConfig(command=program)) as made:
        assert run(made).failure == ""


@pytest.mark.parametrize(
    ("bwrap", "reason"),
    [
        ("", "bubblewrap is not installed"),
        ("exec false", "does not work: exit code 1"),
        ("kill -9 $$", "does not work: its warden was ended by SIGKILL"),
    ],
)
def test_a_sandbox_that_does_not_start_is_refused_with_a_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bwrap: str, reason: str
) -> None:
    if bwrap:
        (tmp_path / "bwrap").write_text(f"#!/bin/sh\n{bwrap}\n")
        (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match=reason) as caught, open_program(AgentConfig(command=("x",))):
        pass
    assert "sandbox = false" in caught.value.fix


def test_a_temporary_folder_with_too_long_a_path_is_refused_with_a_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_bubblewrap()
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(SandboxError, match="too long") as caught, open_program(AgentConfig(command=("true",))):
        pass
    assert "TMPDIR" in caught.value.fix


RUN = """
from rlcore.agents.program import Agents, open_program
from rlcore.config import AgentConfig
from rlcore.types import Prompt

PROMPT = Prompt(prompt_id="p", messages=(), token_ids=(1,), reference="7", task="t")
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
        ("import os; os.kill(os.getpid(), 11)", "exit code 139 (SIGSEGV)"),
        ("import os; os.kill(os.getpid(), 40)", "exit code 168 (signal 40)"),
    ],
)
def test_a_failure_has_its_reason(tmp_path: Path, code: str, failure: str) -> None:
    assert play(tmp_path, code).failure == failure


def test_a_command_that_is_not_there_is_a_failure(tmp_path: Path) -> None:
    made = Program(config=AgentConfig(command=("no-such-program",), sandbox=False), room=tmp_path)
    reason = "the command cannot be started: No such file or directory: no-such-program"
    assert run(made).failure == f"exit code 127; last output: {reason}"


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


@pytest.mark.parametrize(
    ("sandbox", "count", "number"),
    [
        (False, 4, signal.SIGTERM),
        (True, 5, signal.SIGKILL),
        pytest.param(False, 4, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(True, 5, signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
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
