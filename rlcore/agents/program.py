"""Program of an agent: the command of its processes, their environment and folder, and the sandbox around them.

Each process is started with a warden (``warden.py``), and ended with everything that it started.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from rlcore.agents import warden
from rlcore.config import AgentConfig
from rlcore.errors import DataError, SandboxError, shown
from rlcore.sandbox.base import FIX
from rlcore.types import Prompt

TASK_FILE = "task.json"  # of the working folder, as in the environment variable RLCORE_TASK
_MOST_BYTES = 100_000  # of one environment variable; the kernel refuses more than 128 KiB
MAX_FILES, MAX_FILE_BYTES = 20_000, 512 << 20  # that each episode copies
_FILTERED = (
    "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
    "--disable-userns", "--die-with-parent", "--as-pid-1", "--cap-drop", "ALL", "--uid", "65534", "--gid", "65534",
    "--hostname", "box", "--proc", "/proc", "--dev", "/dev",
    "--size", str(64 << 20), "--tmpfs", "/dev/shm", "--size", str(256 << 20), "--tmpfs", "/tmp",
)  # fmt: skip
_FOLDER_BYTES = 1 << 30  # of a working folder in a sandbox, in memory
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/usr", "/opt", *(f"/etc/{name}" for name in (
    "alternatives", "group", "hosts", "ld.so.cache", "localtime", "nsswitch.conf", "passwd", "ssl/certs",
)))  # fmt: skip
_SOCKET_BYTES = 107  # of a Unix socket's path, which the kernel limits
_USUAL = {"LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1"}  # output has the order of events, and a timeout loses none
KEPT_BYTES = 16 << 10  # of the output: its end
MAX_OUTPUT_BYTES = 64 << 20
_PIECE = 1 << 16
_LAST_PIECES = 17  # of output after the end: more than a pipe holds, which a process that escaped may keep open
_END_SECONDS = 15.0  # for a warden to kill its processes
_PLAIN = "or sandbox = false: then an agent has your rights, and reads the keys of other episodes"


@dataclass(frozen=True, kw_only=True)
class Program:
    """Program that is ready to start: ``room`` has the working folders, a sandbox shows the paths in ``readable``."""

    config: AgentConfig
    room: Path
    readable: tuple[str, ...] = ()

    @property
    def socket(self) -> Path | None:
        return self.room / "gateway" / warden.SOCKET if self.config.sandbox else None

    @contextmanager
    def folder(self, prompt: Prompt) -> Iterator[Path]:
        """Make a working folder with copies of the files and the task; remove it on exit.

        Raises:
            DataError: A file cannot be copied.
        """
        folder = Path(tempfile.mkdtemp(dir=self.room))
        try:
            for file in self.config.files:
                _copy(file, folder)
            task = json.dumps(task_of(prompt, self.config.columns))
            (folder / TASK_FILE).write_text(task, encoding="utf-8")
            yield folder
        finally:
            _remove(folder)

    def command(self, folder: Path) -> list[str]:
        """Return the command of a warden that starts the agent, in a sandbox if there is one."""
        parent = [sys.executable, "-I", "-S", "-B", warden.__file__]
        if not self.config.sandbox:
            return [*parent, "plain", *self.config.command]
        files = [part for path in self.readable for part in ("--ro-bind-try", path, path)]
        files += ["--ro-bind", str(self.room / "gateway"), warden.GATEWAY, "--ro-bind", str(folder), warden.FILES]
        files += ["--size", str(_FOLDER_BYTES), "--tmpfs", str(folder), "--chdir", str(folder)]
        closed = ["--remount-ro", "/dev", "--remount-ro", "/", "--"]
        return [str(shutil.which("bwrap")), *_FILTERED, *files, *closed, *parent, "box", *self.config.command]

    def environment(self, key: str, folder: Path, url: str) -> dict[str, str]:
        """Return the environment of an episode, which has nothing else of this process; ``url``: of the gateway.

        ``python`` is the interpreter that runs rlcore. A long task is only in the file ``task.json``.
        """
        task = (folder / TASK_FILE).read_text(encoding="utf-8")
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
        libraries = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        url = f"http://127.0.0.1:{warden.PORT}/v1" if self.config.sandbox else url
        own = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key, "HOME": str(folder), "TMPDIR": str(folder)}
        given = {"RLCORE_TASK": task} if len(task) <= _MOST_BYTES else {}
        return {"PATH": path, **_USUAL, **libraries, **self.config.env, **own, **given}


def task_of(prompt: Prompt, columns: tuple[str, ...]) -> Mapping[str, object]:
    """Return the task as an agent reads it: without the reference answer, and with the named columns of its row."""
    row = prompt.row
    return {
        "prompt_id": prompt.prompt_id,
        "task": prompt.task,
        "messages": [{"role": message.role, "content": message.content} for message in prompt.messages],
        "columns": {name: row[name] for name in columns if name in row},
    }


def files_below(path: Path) -> list[Path]:
    """Return a file, or the files and links of a folder, in order.

    Raises:
        DataError: The folder is too large to be copied for each episode.
    """
    if not path.is_dir():
        return [path]
    every = (each for each in path.rglob("*") if each.is_symlink() or not each.is_dir())
    found = sorted(islice(every, MAX_FILES + 1))
    size = sum(each.lstat().st_size for each in found)
    if len(found) > MAX_FILES or size > MAX_FILE_BYTES:
        raise DataError(
            f"each episode copies the folder, which has {size >> 20} MiB in {len(found)} files or more "
            f"(limits {MAX_FILE_BYTES >> 20} MiB and {MAX_FILES})",
            where=str(path),
            fix="name it in sampling.agent.sandbox_read, which copies nothing, and its path in env or command",
        )
    return found


def _copy(file: str, folder: Path) -> None:
    try:
        if Path(file).is_dir():
            shutil.copytree(file, folder / Path(file).name, symlinks=True)
        else:
            shutil.copy(file, folder)
    except OSError as error:
        what = f"a file of the agent cannot be copied: {error.strerror or error}"
        raise DataError(what, where=file, fix="correct sampling.agent.files") from error


@contextmanager
def open_program(config: AgentConfig) -> Iterator[Program]:
    """Prepare the program of agents.

    Raises:
        SandboxError: The sandbox does not start.
        DataError: A folder of the agent is too large.
    """
    for file in config.files:
        files_below(Path(file))
    room = Path(tempfile.mkdtemp(prefix="rlcore-agents-"))
    try:
        (room / "gateway").mkdir()
        program = Program(config=config, room=room, readable=_readable(config) if config.sandbox else ())
        if config.sandbox:
            _self_test(program)
        yield program
    finally:
        _remove(room)


def _self_test(program: Program) -> None:
    if len(os.fsencode(str(program.socket))) > _SOCKET_BYTES:
        raise SandboxError(
            f"the path of the gateway's socket is too long: {program.socket}", fix="set TMPDIR to a shorter path"
        )
    if shutil.which("bwrap") is None:
        install = "as root: apt-get install bubblewrap (Fedora: dnf install bubblewrap)"
        raise SandboxError("bubblewrap is not installed, so agents cannot be isolated", fix=f"{install}; {_PLAIN}")
    simple = replace(program, config=replace(program.config, command=("true",), files=()))
    with simple.folder(Prompt(prompt_id="", messages=(), token_ids=(), reference="", task="")) as folder:
        ended = Agents().run(simple.command(folder), simple.environment("", folder, ""), folder, seconds=60.0)
    if ended.failure:
        raise SandboxError(f"an agent's sandbox does not work: {ended.failure}", fix=f"{FIX}; {_PLAIN}")


def _remove(folder: Path) -> None:
    """Remove a folder; what an agent made too deep or immutable is left, and ends no run.

    Only rmtree and rm, which follow no link that an agent left: both work on descriptors of folders.
    """
    with suppress(OSError, RecursionError):
        shutil.rmtree(folder)
    if os.path.lexists(folder):
        subprocess.run(["rm", "-rf", "--", str(folder)], stderr=subprocess.DEVNULL, check=False)


def _readable(config: AgentConfig) -> tuple[str, ...]:
    python = (sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parent))
    own = (warden.__file__, *(word for word in config.command if Path(word).is_absolute()))
    known = dict.fromkeys((*_SYSTEM, *python))
    new = (each for each in own if not any(Path(each).is_relative_to(folder) for folder in known))
    return (*known, *dict.fromkeys(new), *config.sandbox_read)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """End of an agent.

    Attributes:
        code: Exit code, 128 + its number for a signal; None if it was ended or did not start.
        error: Reason if it was ended or did not start.
        is_late: True if it timed out.
    """

    code: int | None
    output: str = ""
    error: str = ""
    is_late: bool = False

    @property
    def failure(self) -> str:
        """Reason of the failure with the last line of the output, or ""."""
        how = self.error or (_described(self.code) if self.code else "")
        last = next((line for line in reversed(self.output.splitlines()) if line.strip()), "")
        return f"{how}; last output: {shown(last.strip())}" if how and last else how


class Agents:
    """Running agents. Another thread may end them all; after that none starts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[_Agent] = set()
        self._is_over = False

    def run(self, command: Sequence[str], environment: Mapping[str, str], folder: Path, *, seconds: float) -> Ended:
        """Run a warden's command to its end, at most ``seconds``; no process of the agent is left."""
        with self._lock:
            if self._is_over:
                return Ended(code=None, error="the run ended before it began")
            try:
                agent = _Agent(command, environment, folder)
            except OSError as error:
                return Ended(code=None, error=f"its process cannot be started: {error}")
            self._running.add(agent)
        try:
            return agent.wait(seconds)
        finally:
            with self._lock:
                self._running.remove(agent)

    def end(self) -> None:
        with self._lock:
            self._is_over = True
            for agent in self._running:
                agent.end("the run ended")


class _Agent:
    def __init__(self, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        self._reason, self._output, self._size = "", b"", 0
        self._control, far_end = socket.socketpair()
        with far_end, _ahead_of_others():
            self._process = subprocess.Popen(
                command,
                stdin=far_end.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                cwd=folder,
                env=dict(environment),
                start_new_session=True,  # Ctrl-C reaches only the run, which then ends its agents
            )

    def end(self, reason: str) -> None:
        self._reason = self._reason or reason
        self._process.send_signal(signal.SIGCONT)  # the agent may have stopped it
        with suppress(OSError):  # it has ended
            self._control.shutdown(socket.SHUT_RDWR)

    def wait(self, seconds: float) -> Ended:
        late = f"timed out after {seconds:g} s"
        with self._process as process, self._control, os.fdopen(os.pidfd_open(process.pid), "rb", 0) as handle:
            if not self._follow(handle.fileno(), seconds, MAX_OUTPUT_BYTES):
                is_long = self._size > MAX_OUTPUT_BYTES
                self.end(f"wrote more than {MAX_OUTPUT_BYTES >> 20} MiB of output" if is_long else late)
                if not self._follow(handle.fileno(), _END_SECONDS, sys.maxsize):
                    warden.kill([*warden.descendants(process.pid), process.pid])
        code = None if self._reason else process.returncode
        text = self._output.decode("utf-8", "replace")
        return Ended(code=code, output=text, error=self._reason, is_late=self._reason == late)

    def _follow(self, handle: int, seconds: float, most_bytes: int) -> bool:
        """Read the output until the warden has ended; return False if it does not in time, or if that is too long."""
        assert self._process.stdout is not None
        output, deadline = self._process.stdout.fileno(), time.monotonic() + seconds
        ends, num_left = {handle, output}, _LAST_PIECES
        while (left := deadline - time.monotonic()) > 0.0 and self._size <= most_bytes:
            ready = _ready(ends, left)
            num_left -= handle in ready
            if handle in ready and (output not in ready or not num_left):
                return True
            if output in ready:
                piece = os.read(output, _PIECE)
                self._output, self._size = (self._output + piece)[-KEPT_BYTES:], self._size + len(piece)
                ends -= {output} if not piece else set()
        return False


@contextmanager
def _ahead_of_others() -> Iterator[None]:
    """Start processes of this thread with real-time priority, where the system allows it.

    The kernel does not limit the processes of root, so a warden must be able to count them on a busy machine.
    """
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError:  # no such right, or a kernel without such priorities
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, *before)


def _described(code: int) -> str:
    known = {each.value: each.name for each in signal.Signals}  # real-time signals have no name
    number = -code if code < 0 else code - 128
    name = known.get(number, f"signal {number}")
    if code < 0:
        return f"its warden was ended by {name}"
    return f"exit code {code}" + (f" ({name})" if 0 < number < signal.NSIG else "")


def _ready(descriptors: set[int], seconds: float) -> set[int]:
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(seconds * 1000.0)}
