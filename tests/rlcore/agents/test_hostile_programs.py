"""Programs that attack their warden, the machine or other episodes end alone, in time, and with all they started."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest

from rlcore.agents.processes import Agents, Ended
from rlcore.agents.program import open_program
from rlcore.config import AgentConfig
from rlcore.openai_api.guard import Receive, Scope, Send
from rlcore.openai_api.server import ServerThread
from tests.rlcore.agents.programs import PROMPT, marked
from tests.rlcore.sandbox.conftest import require_bubblewrap
from tests.waiting import given_time, until

LATE_SECONDS, SECONDS = 2.0, 600.0  # of an agent that hangs, of another
MOST_SECONDS = 900.0  # of a row, on a busy machine
LATE, KILLED, FINE = "timed out after", "exit code 137", ""
WARDEN_KILLED = "its warden was ended by SIGKILL"


@dataclass(frozen=True)
class Row:
    """An attack: how its agent fails in a sandbox and without one, as the begin of a text.

    ``plain``: None if it is not tried without a sandbox, since it would succeed. ``output``: in a sandbox.
    ``leaves``: without a sandbox a process escapes.
    """

    code: str
    box: str
    plain: str | None
    output: str = ""
    leaves: bool = False


BEGIN = """
import ctypes, mmap, os, pathlib, resource, signal, socket, subprocess, sys, threading, time
PARENT, GATEWAY = os.getppid(), ("127.0.0.1", int(os.environ["OPENAI_BASE_URL"].split(":")[2].partition("/")[0]))
print("began", flush=True)
"""
FORGE = """
for number in (1, 2):
    try:
        with open(f"/proc/{{PARENT}}/fd/{{number}}", "wb") as file:
            file.write({report!r})
    except OSError as error:
        print(type(error).__name__, flush=True)
try:
    os.kill(PARENT, signal.SIGKILL)
except OSError:
    pass
time.sleep(0.3)
sys.exit(3)
"""
DAEMON = """
if not os.fork():
    {how}
    os.closerange(0, 3)
    time.sleep(600)
{then}
"""
BOMB = """
try:
    {what}
except (MemoryError, OSError) as error:
    print(type(error).__name__, getattr(error, "errno", ""), flush=True)
"""
REPORTS = {
    "an empty list": b"[]",
    "success": b'{"code": 0, "output": "", "error": ""}',
    "a full pipe": b"!" * 70_000,
}
ROWS = {
    **{
        f"forges {name} and kills its parent": Row(FORGE.format(report=report), "exit code 3", WARDEN_KILLED)
        for name, report in REPORTS.items()
    },
    "stops its parent, then hangs": Row("os.kill(PARENT, signal.SIGSTOP); time.sleep(600)", LATE, LATE),
    "stops its parent, then ends": Row("os.kill(PARENT, signal.SIGSTOP)", FINE, LATE),
    "stops its parent again and again": Row(
        "while True:\n    os.kill(PARENT, signal.SIGSTOP)\n    time.sleep(0.001)", LATE, LATE
    ),
    "sends its parent every other signal": Row(
        "[os.kill(PARENT, n) for n in range(1, 65) if n not in (9, 19, 32, 33)]; time.sleep(0.3)", FINE, FINE
    ),
    "kills every process that it sees": Row(
        "try: os.kill(-1, 9)\nexcept ProcessLookupError: print('alone')", FINE, None, "alone"
    ),
    "kills its parent and leaves a daemon": Row(
        DAEMON.format(how="os.setsid()", then="os.kill(PARENT, 9); time.sleep(600)"), LATE, WARDEN_KILLED, leaves=True
    ),
    "leaves a background child": Row(DAEMON.format(how="pass", then=""), FINE, FINE),
    "leaves a child in a session of its own": Row(DAEMON.format(how="os.setsid()", then=""), FINE, FINE),
    "leaves a daemon without parent": Row(
        DAEMON.format(how="os.setsid(); os.fork() and os._exit(0); os.environ.clear()", then="os.wait()"), FINE, FINE
    ),
    "leaves a grandchild that holds its output": Row(
        "subprocess.Popen(['sh', '-c', 'sleep 600 & sleep 600'], start_new_session=True); print('done')",
        FINE,
        FINE,
        "done",
    ),
    "leaves a child that ignores signals": Row(
        "if not os.fork():\n    [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 3, 15)]\n    time.sleep(600)",
        FINE,
        FINE,
    ),
    "forks without end": Row("while True: os.fork() or (signal.pause(), os._exit(0))", KILLED, None, "limit "),
    "forks without end, and its children too": Row(
        "while True:\n    try:\n        os.fork()\n    except OSError:\n        time.sleep(0.01)",
        KILLED,
        None,
        "limit ",
    ),
    "goes ahead of others, as its warden does": Row(
        "print('policy', os.sched_getscheduler(0))\n"
        "try: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))\nexcept PermissionError: print('refused')",
        FINE,
        None,
        f"policy {os.SCHED_OTHER}\nrefused",
    ),
    "starts threads without end": Row(
        "threading.stack_size(1 << 16)\nwhile True: threading.Thread(target=time.sleep, args=(600,)).start()",
        KILLED,
        None,
        "limit 512",
    ),
    "takes memory": Row(BOMB.format(what="bytearray(5 << 30)"), FINE, None, "MemoryError"),
    "takes memory in two processes": Row(
        "os.fork()\nkept = bytearray(b'x') * (9 << 28)\ntime.sleep(600)", KILLED, None, "its processes take"
    ),
    "takes shared memory": Row(
        "kept = mmap.mmap(-1, 5 << 30)\nfor at in range(0, 5 << 30, 4096): kept[at] = 1",
        KILLED,
        None,
        "its processes take",
    ),
    "fills /tmp": Row(BOMB.format(what="open('/tmp/x', 'wb').write(bytes(300 << 20))"), FINE, None, "OSError 28"),
    "fills /dev/shm": Row(
        BOMB.format(what="open('/dev/shm/x', 'wb').write(bytes(100 << 20))"), FINE, None, "OSError 28"
    ),
    "fills its folder": Row(
        "x = os.open('x', os.O_CREAT | os.O_WRONLY)\n" + BOMB.format(what="while True: os.write(x, bytes(1 << 26))"),
        FINE,
        None,
        "OSError 28",
    ),
    "fills the root of the file system": Row(BOMB.format(what="open('/x', 'wb')"), FINE, None, "OSError 30"),
    "floods its output": Row(
        "while True: os.write(1, bytes(1 << 16))", "wrote more than 64 MiB", "wrote more than 64 MiB"
    ),
    "writes an endless line slowly": Row("while True: os.write(1, b'x'); time.sleep(0.01)", LATE, LATE, "xxx"),
    "writes a very long last line": Row(
        "os.write(1, b'x' * 300_000); sys.exit(1)", "exit code 1; last output: xxx", "exit code 1; last output: xxx"
    ),
    "writes invalid UTF-8 and control characters": Row(
        r"os.write(2, b'\xff\xfe\x1b[2J\0'); sys.exit(1)", "exit code 1", "exit code 1"
    ),
    "closes all its descriptors": Row(
        "os.closerange(0, 256); time.sleep(0.3); os._exit(4)", "exit code 4", "exit code 4"
    ),
    "writes to the descriptors of its parent": Row(
        "for n in range(10):\n    "
        + BOMB.replace("\n", "\n    ").format(what="open(f'/proc/{PARENT}/fd/{n}', 'wb').write(b'!')"),
        FINE,
        FINE,
    ),
    "traces its parent": Row("print(ctypes.CDLL(None).ptrace(16, PARENT, 0, 0))", FINE, None, "-1"),
    "reads the environment of others": Row(
        "found = b''\nfor path in pathlib.Path('/proc').glob('[0-9]*/environ'):\n    try: found += path.read_bytes()\n"
        "    except OSError: pass\nprint(b'API_KEY=' in found, b'KEY=bystander' in found)",
        FINE,
        None,
        "True False",
    ),
    "connects elsewhere": Row(
        "for host in ('127.0.0.1', '198.51.100.1'):\n    try: socket.create_connection((host, 80), timeout=5)\n"
        "    except OSError as error: print(error.errno)",
        FINE,
        None,
        "111\n101",
    ),
    "opens a thousand connections": Row(
        "kept = []\nfor _ in range(1000):\n    try: kept.append(socket.create_connection(GATEWAY, timeout=1))\n"
        "    except OSError: break\nprint('opened', flush=True)",
        FINE,
        None,
        "opened",
    ),
    "makes a folder deeper than a path may be": Row("for _ in range(3000): os.mkdir('d'); os.chdir('d')", FINE, FINE),
    "closes its folder and removes rights": Row(
        "os.makedirs('a/b'); os.chmod('a/b', 0); os.chmod('a', 0); os.chmod('.', 0)", FINE, FINE
    ),
    "links to another folder": Row("os.symlink(CANARY, 'link'); os.mkdir('a'); os.symlink(CANARY, 'a/b')", FINE, FINE),
    "deletes its folder": Row(
        "import shutil\nhome = os.getcwd()\nos.chdir('/')\nshutil.rmtree(home, ignore_errors=True)", FINE, FINE
    ),
    "replaces its folder by a link": Row(
        "home = os.getcwd()\nos.remove('task.json')\nos.chdir('/')\n"
        "try:\n    os.rmdir(home); os.symlink(CANARY, home)\nexcept OSError: pass",
        FINE,
        FINE,
    ),
    "makes immutable files": Row(
        "open('x', 'w')\nsubprocess.run(['chattr', '+i', 'x'], stderr=subprocess.DEVNULL)", FINE, None
    ),
    "mounts and makes namespaces": Row(
        "c = ctypes.CDLL(None)\nprint(c.unshare(1 << 28), c.unshare(1 << 17), c.mount(b'x', b'/tmp', b'tmpfs', 0, 0))",
        FINE,
        None,
        "-1 -1 -1",
    ),
    **{
        f"ends by signal {number}": Row(
            f"{number} == 9 or signal.signal({number}, 0); os.kill(os.getpid(), {number})",
            f"exit code {128 + number}",
            f"exit code {128 + number}",
        )
        for number in (1, 2, 3, 6, 9, 11, 13, 15, 24, 34, 64)
    },
}


class Gateway:
    """A gateway that answers ``/wait`` once the attack is over."""

    is_over = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].endswith("wait"):
            await asyncio.to_thread(self.is_over.wait, MOST_SECONDS)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"fine"})


def run(code: str, key: str, *, is_boxed: bool, seconds: float) -> Ended:
    config = AgentConfig(command=("python", "-c", code), sandbox=is_boxed)
    with open_program(config) as program:
        server = ServerThread(Gateway())
        url = f"http://127.0.0.1:{server.start(program.socket)}/v1"
        with program.folder(PROMPT) as folder:
            ended = Agents().run(
                program.command(folder), program.environment(key, folder, url), folder, seconds=seconds
            )
        server.stop()
        if is_boxed or os.geteuid() == 0:  # others cannot remove a folder without rights
            assert [path.name for path in program.room.iterdir()] == ["gateway"]
    return ended


@contextmanager
def bystander(*, is_boxed: bool) -> Iterator[list[Ended]]:
    """Another episode, which calls the gateway during an attack, and ends well."""
    code = "import os, urllib.request as u\nprint(u.urlopen(os.environ['OPENAI_BASE_URL'] + '/wait').read().decode())"
    found = list[Ended]()
    Gateway.is_over.clear()
    thread = threading.Thread(
        target=lambda: found.append(run(code, "bystander", is_boxed=is_boxed, seconds=MOST_SECONDS))
    )
    thread.start()
    try:
        yield found
    finally:
        Gateway.is_over.set()
        thread.join()


PLACES = [(name, place) for name, row in ROWS.items() for place in ("box", "plain") if getattr(row, place) is not None]


@pytest.mark.parametrize(("name", "place"), PLACES)
def test_an_attack_ends_alone_in_time_and_with_all_that_it_started(name: str, place: str, tmp_path: Path) -> None:
    row, is_boxed, mark = ROWS[name], place == "box", uuid4().hex
    failure, canary = getattr(row, place), tmp_path / "canary"
    canary.mkdir()
    (canary / "file").write_text("x")
    if is_boxed:
        require_bubblewrap()
    code = f"{BEGIN}CANARY = {str(canary)!r}  # {mark}\n{row.code}"
    with bystander(is_boxed=is_boxed) as other:
        began = time.monotonic()
        ended = given_time(
            lambda seconds: run(code, mark, is_boxed=is_boxed, seconds=seconds),
            lambda made: (
                made.code is not None or ("began" in made.output and (not is_boxed or row.output in made.output))
            ),
            seconds=LATE_SECONDS if failure == LATE else SECONDS,
        )
        seconds = time.monotonic() - began
    assert ended.failure.startswith(failure) and bool(ended.failure) == bool(failure), ended
    assert seconds < MOST_SECONDS
    assert (other[0].failure, other[0].output) == ("", "fine\n")
    assert (canary / "file").read_text() == "x"
    if is_boxed:
        assert row.output in ended.output, ended.output[-500:]
    if row.leaves and not is_boxed:
        (left,) = marked(mark)
        os.kill(left, signal.SIGKILL)
    until(lambda: not marked(mark))
