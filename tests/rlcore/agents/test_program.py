"""The program of an agent: its folder, environment and task, a function instead of a command, and the sandbox."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from uuid import uuid4

import pytest

from rlcore.agents.processes import Agents, Ended
from rlcore.agents.program import Program, open_program, task_of
from rlcore.config import AgentConfig
from rlcore.errors import DataError
from rlcore.types import Message, Prompt
from tests.rlcore.agents.programs import DAEMON, PROMPT, is_alive
from tests.rlcore.sandbox.conftest import require_bubblewrap

SHOWN = "import json, os; print(json.dumps([dict(os.environ), sorted(os.listdir()), json.load(open('task.json'))]))"
ROW = dataclasses.replace(PROMPT, columns=json.dumps({"answer": "7", "repo": "r"}))


class Hello(BaseHTTPRequestHandler):
    """A gateway that greets."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"hello " + self.path.encode())

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hello) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


def run(program: Program, prompt: Prompt = PROMPT) -> Ended:
    with program.folder() as folder:
        environment = program.environment(prompt, "secret", folder)
        return Agents().run(program.command(folder), environment, folder, seconds=60.0)


def run_code(code: str, url: str, **settings: object) -> Ended:
    config = AgentConfig(command=("python", "-c", code), **settings)  # type: ignore[arg-type]
    with open_program(config, url) as program:
        return run(program)


def test_an_agent_reads_its_task_and_key_and_nothing_else_of_this_process(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "mine")
    (tmp_path / "helper.txt").write_text("x")
    config = AgentConfig(
        command=("python", "-c", SHOWN), files=(str(tmp_path / "helper.txt"),), env={"MODE": "fast"}, columns=("repo",)
    )
    with open_program(config, url) as program:
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
        "OPENAI_BASE_URL": url,
        "OPENAI_API_KEY": "secret",
        "MODE": "fast",
        "LANG": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
    }
    ours = {name: value for name, value in environment.items() if name not in ("PATH", "LC_CTYPE", "LD_LIBRARY_PATH")}
    assert ours == expected


def test_neither_the_reference_answer_nor_an_unnamed_column_is_in_the_task() -> None:
    task = json.dumps(task_of(ROW, ()))
    assert '"7"' not in task
    assert '"columns": {}' in task


def test_a_task_that_no_environment_variable_can_hold_is_in_the_file(url: str) -> None:
    long = dataclasses.replace(PROMPT, messages=(Message(role="user", content="a\udc80" * 200_000),))
    code = "import os; print(os.path.getsize('task.json') > 1_000_000, 'RLCORE_TASK' in os.environ)"
    with open_program(AgentConfig(command=("python", "-c", code)), url) as program:
        assert run(program, long).output.split() == ["True", "False"]


def test_each_episode_has_a_folder_of_its_own_that_goes_with_it(url: str) -> None:
    with open_program(AgentConfig(command=("true",)), url) as program:
        with program.folder() as one, program.folder() as other:
            assert one != other
            (one / "deep").mkdir()
            (one / "deep" / "file").write_text("x")
        assert not one.exists() and not other.exists()
        room = program.room
    assert not room.exists()


def test_a_folder_deeper_than_python_can_follow_is_removed(url: str) -> None:
    code = "import os\nfor _ in range(3000):\n    os.mkdir('d')\n    os.chdir('d')"
    with open_program(AgentConfig(command=("python", "-c", code)), url) as program:
        assert run(program).failure == ""
        assert list(program.room.iterdir()) == []


def test_a_folder_that_cannot_be_removed_ends_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("immutable")

    with open_program(AgentConfig(command=("true",)), url) as program:
        monkeypatch.setattr(shutil, "rmtree", refuse)
        assert run(program).failure == ""


def test_a_file_that_is_not_there_is_named(url: str) -> None:
    config = AgentConfig(command=("x",), files=("gone.py",))
    with open_program(config, url) as program, pytest.raises(DataError, match=r"gone\.py"), program.folder():
        pass


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_function_is_called_with_the_task(
    kind: str, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_agent.py").write_text(f"import os\n{kind} play(task):\n    print(task['prompt_id'], os.getcwd())\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with open_program(AgentConfig(function="my_agent:play"), url) as program:
        ended = run(program)
        assert ended.failure == ""
        assert ended.output.startswith(f"p {program.room}")


GET = "import urllib.request as u; print(u.urlopen('{}', timeout=20).read().decode())"
SEEN = """
import os, pathlib, socket
def reach(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5)
        return True
    except OSError:
        return False
print([os.path.exists(path) for path in {paths!r}], reach({port}), reach({other}), len(os.listdir({room!r})))
pathlib.Path("/usr/x").touch()
"""


def test_in_the_sandbox_an_agent_reaches_the_gateway_and_no_other_file_port_or_folder(url: str, tmp_path: Path) -> None:
    require_bubblewrap()
    with ThreadingHTTPServer(("127.0.0.1", 0), Hello) as private:
        secret = tmp_path / "secret"
        secret.write_text("x")
        port, paths = int(url.split(":")[2].partition("/")[0]), [str(secret), str(Path(__file__))]
        config = AgentConfig(command=("python", "agent.py"), files=(str(tmp_path / "agent.py"),), sandbox=True)
        (tmp_path / "agent.py").write_text("")
        with open_program(config, url) as program, program.folder() as other_episode:
            seen = SEEN.format(paths=paths, port=port, other=private.server_port, room=str(program.room))
            (tmp_path / "agent.py").write_text(GET.format(f"{url}/models") + "\n" + seen)
            ended = run(program)
            assert other_episode.exists()
    lines = ended.output.splitlines()
    assert lines[:2] == ["hello /v1/models", "[False, False] True False 1"]
    assert "Read-only file system: '/usr/x'" in lines[-1]
    assert ended.code == 1


def test_in_the_sandbox_a_daemon_ends_and_the_folder_can_be_written(url: str) -> None:
    require_bubblewrap()
    mark = uuid4().hex  # in the command lines of this agent and of no other on the machine
    code = f"# {mark}\nopen('x', 'w').write('y'); print(open('x').read())\n"
    ended = run_code(code + DAEMON.format(then="pass"), url, sandbox=True)
    written, text = ended.output.split(maxsplit=1)
    assert written == "y"
    assert text.startswith("daemon ")
    marked = [path for path in Path("/proc").glob("[0-9]*/cmdline") if is_alive(int(path.parent.name))]
    assert not any(mark.encode() in _read(path) for path in marked)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended
        return b""
