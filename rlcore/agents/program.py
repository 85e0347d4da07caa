"""Program of an agent: the command of its processes, their environment and folder, and the sandbox around them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from rlcore.agents import warden
from rlcore.agents.call import TASK_FILE
from rlcore.config import AgentConfig
from rlcore.errors import DataError, SandboxError
from rlcore.types import Prompt

_MOST_BYTES = 100_000  # of one environment variable; the kernel refuses more than 128 KiB
_FILTERED = (
    "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
    "--disable-userns", "--die-with-parent", "--cap-drop", "ALL", "--uid", "65534", "--gid", "65534",
    "--hostname", "box", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp",
)  # fmt: skip
_PROGRAMS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/usr", "/opt")
_SETTINGS = ("alternatives", "group", "ld.so.cache", "localtime", "nsswitch.conf", "passwd", "ssl")  # of /etc
_SOCKET = "/run/gateway.sock"
_USUAL = {"LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1"}  # output has the order of events, and a timeout loses none


@dataclass(frozen=True, kw_only=True)
class Program:
    """Program that is ready to start: ``url`` of the gateway, ``room`` for working folders, and ``socket`` of a box."""

    config: AgentConfig
    url: str
    room: Path
    socket: Path | None = None

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """Make a working folder with copies of the files; remove it on exit.

        Raises:
            DataError: A file cannot be copied.
        """
        folder = Path(tempfile.mkdtemp(dir=self.room))
        try:
            for file in self.config.files:
                _copy(file, folder)
            yield folder
        finally:
            _remove(folder)

    def command(self, folder: Path) -> list[str]:
        """Return the command of a warden that starts the agent, in a sandbox if there is one."""
        own = list(self.config.command) or [sys.executable, "-P", "-m", "rlcore.agents.call", self.config.function]
        bridge = f"{urlsplit(self.url).port}:{_SOCKET}" if self.socket else ""
        parent = [sys.executable, "-I", "-S", "-B", warden.__file__, bridge, *own]
        return [*_box(folder, self.socket), "--", *parent] if self.socket else parent

    def environment(self, prompt: Prompt, key: str, folder: Path) -> dict[str, str]:
        """Write the task into the working folder, and return the environment, which has nothing else of this process.

        ``python`` is the interpreter that runs rlcore. A long task is only in the file ``task.json``.
        """
        task = json.dumps(task_of(prompt, self.config.columns))
        (folder / TASK_FILE).write_text(task, encoding="utf-8")
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
        libraries = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        modules = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} if self.config.function else {}
        own = {"OPENAI_BASE_URL": self.url, "OPENAI_API_KEY": key, "HOME": str(folder), "TMPDIR": str(folder)}
        given = {"RLCORE_TASK": task} if len(task) <= _MOST_BYTES else {}
        return {"PATH": path, **_USUAL, **libraries, **modules, **self.config.env, **own, **given}


def task_of(prompt: Prompt, columns: tuple[str, ...]) -> Mapping[str, object]:
    """Return the task as an agent reads it: without the reference answer, and with the named columns of its row."""
    row = prompt.row
    return {
        "prompt_id": prompt.prompt_id,
        "task": prompt.task,
        "messages": [{"role": message.role, "content": message.content} for message in prompt.messages],
        "columns": {name: row[name] for name in columns if name in row},
    }


def _copy(file: str, folder: Path) -> None:
    try:
        shutil.copy(file, folder)
    except OSError as error:
        what = f"a file of the agent cannot be copied: {error.strerror}"
        raise DataError(what, where=file, fix="correct sampling.agent.files") from error


@contextmanager
def open_program(config: AgentConfig, url: str) -> Iterator[Program]:
    """Prepare the program of agents that call the gateway at ``url``.

    Raises:
        SandboxError: bubblewrap is not installed.
    """
    with ExitStack() as stack:
        room = tempfile.mkdtemp(prefix="rlcore-agents-")
        stack.callback(_remove, Path(room))
        door = stack.enter_context(_gateway_socket(url)) if config.sandbox else None
        yield Program(config=config, url=url, room=Path(room), socket=door)


def _remove(folder: Path) -> None:
    """Remove a folder; what an agent made too deep or immutable is left, and ends no run."""
    with suppress(OSError, RecursionError):
        shutil.rmtree(folder)
    if folder.exists():
        subprocess.run(["rm", "-rf", str(folder)], stderr=subprocess.DEVNULL, check=False)


@contextmanager
def _gateway_socket(url: str) -> Iterator[Path]:
    """Open a Unix socket that leads to the gateway, and to nothing else."""
    if shutil.which("bwrap") is None:
        raise SandboxError("bubblewrap is not installed, so agents cannot be isolated", fix="install bubblewrap")
    address = urlsplit(url)
    target = (str(address.hostname), int(address.port or 0))
    with tempfile.TemporaryDirectory(prefix="rlcore-door-") as name, socket.socket(socket.AF_UNIX) as listener:
        path = Path(name) / "gateway.sock"
        listener.bind(str(path))
        listener.listen()
        warden.forward(listener, lambda: socket.create_connection(target))
        yield path


def _box(folder: Path, door: Path) -> list[str]:
    """Return the arguments of bubblewrap: programs to read, the working folder, and the socket to the gateway."""
    python = [sys.prefix, sys.base_prefix]
    readable = [path for path in python if not any(Path(path).is_relative_to(each) for each in _PROGRAMS)]
    arguments = [str(shutil.which("bwrap")), *_FILTERED]
    for path in (*_PROGRAMS, *(f"/etc/{name}" for name in _SETTINGS), *dict.fromkeys(readable), warden.__file__):
        arguments += ["--ro-bind-try", path, path]
    arguments += ["--bind", str(door), _SOCKET, "--bind", str(folder), str(folder), "--chdir", str(folder)]
    return arguments
