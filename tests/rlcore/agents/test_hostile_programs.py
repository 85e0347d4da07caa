"""Programs that attack their warden, the machine or other episodes end alone, in time, and with all they started.

A row of ``rows/attacks.jsonl`` has how its agent fails in a sandbox (``box``) and without one (``plain``), as the begin
of a text; no ``plain``: it would succeed there. ``output``: in a sandbox. ``leaves``: without one a process escapes.
``is_held``: without one, its warden cannot end it, and the run does once it has waited.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from rlcore.agents import program as programs
from rlcore.agents.program import Ended, Program, open_program
from rlcore.config import AgentConfig
from rlcore.openai_api.guard import Receive, Scope, Send
from rlcore.openai_api.server import ServerThread
from tests.rlcore.agents.programs import marked, run
from tests.rlcore.sandbox.conftest import require_bubblewrap
from tests.rows import rows_of
from tests.waiting import LONG, given_time, until

LATE_SECONDS, SECONDS = 1.0, 600.0  # of an agent that hangs, of another
MOST_SECONDS = 900.0  # of a row, on a busy machine
BEGIN = """
import ctypes, mmap, os, pathlib, resource, signal, socket, subprocess, sys, threading, time
PARENT, GATEWAY = os.getppid(), ("127.0.0.1", int(os.environ["OPENAI_BASE_URL"].split(":")[2].partition("/")[0]))
print("began", flush=True)
"""
BYSTANDER = """
import os, time, urllib.request as u
while u.urlopen(os.environ['OPENAI_BASE_URL'] + '/beat').read() == b'go on':
    time.sleep(0.02)
print('fine')
"""
ROWS = {row["name"]: row for row in rows_of(__file__, "attacks")}
SLOW = {"takes shared memory"}  # 5 GiB, like "takes memory in two processes"


@dataclass
class Arena:
    """Room and gateway of many attacks, and another episode there, which calls the gateway all the time."""

    program: Program
    is_boxed: bool
    url: str = ""
    num_beats: int = 0
    is_over: bool = False
    bystander: list[Ended] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_beats += scope["path"].endswith("beat")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"fine" if self.is_over else b"go on"})

    def run(self, code: str, key: str, *, seconds: float) -> Ended:
        program = replace(self.program, config=replace(self.program.config, command=("python", "-c", code)))
        return run(program, key=key, url=self.url, seconds=seconds)

    def has_bystander(self) -> bool:
        """Return True if the other episode calls the gateway still."""
        before = self.num_beats
        until(lambda: self.num_beats > before + 1 or self.bystander, "a call of the other episode")
        return not self.bystander

    def folders(self) -> set[str]:
        return {path.name for path in self.program.room.iterdir()}


@contextmanager
def opened(place: str) -> Iterator[Arena]:
    is_boxed = place == "box"
    if is_boxed:
        require_bubblewrap()
    with open_program(AgentConfig(command=("true",), sandbox=is_boxed)) as program:
        made = Arena(program, is_boxed)
        server = ServerThread(made)
        made.url = f"http://127.0.0.1:{server.start(program.socket)}/v1"
        thread = threading.Thread(
            target=lambda: made.bystander.append(made.run(BYSTANDER, "bystander", seconds=MOST_SECONDS * 9))
        )
        thread.start()
        try:
            yield made
        finally:
            made.is_over = True
            thread.join(LONG)
            server.stop()
    assert (made.bystander[0].failure, made.bystander[0].output) == ("", "fine\n")


@pytest.fixture(scope="module")
def arenas() -> Iterator[Callable[[str], Arena]]:
    """One arena in a sandbox and one without, each opened when it is first used."""
    with ExitStack() as stack:
        yield cache(lambda place: stack.enter_context(opened(place)))


@pytest.mark.parametrize(
    ("place", "name"),
    [
        pytest.param(place, name, marks=[pytest.mark.slow] if name in SLOW else [])
        for place in ("box", "plain")
        for name, row in ROWS.items()
        if place in row
    ],
)
def test_an_attack_ends_alone_in_time_and_with_all_that_it_started(
    arenas: Callable[[str], Arena], place: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = arenas(place)
    assert arena.has_bystander()
    row: dict[str, Any] = ROWS[name]
    mark, output = uuid4().hex, row.get("output", "") if arena.is_boxed else ""
    failure, canary, folders = row[place], tmp_path / "canary", arena.folders()
    if row.get("is_held"):
        monkeypatch.setattr(programs, "_END_SECONDS", 1.0)
    canary.mkdir()
    (canary / "file").write_text("x")
    code = f"{BEGIN}CANARY = {str(canary)!r}  # {mark}\n{row['code']}"
    began = time.monotonic()
    ended = given_time(
        lambda seconds: arena.run(code, mark, seconds=seconds),
        lambda made: made.code is not None or ("began" in made.output and output in made.output),
        seconds=LATE_SECONDS if failure.startswith("timed out") else SECONDS,
    )
    assert time.monotonic() - began < MOST_SECONDS
    assert ended.failure.startswith(failure) and bool(ended.failure) == bool(failure), ended
    assert arena.has_bystander()
    assert (canary / "file").read_text() == "x"
    assert output in ended.output, ended.output[-500:]
    if arena.is_boxed or os.geteuid() == 0:  # others cannot remove a folder without rights
        assert arena.folders() == folders
    if row.get("leaves") and not arena.is_boxed:
        until(lambda: len(marked(mark)) == 1, "the end of all but the process that escaped")
        os.kill(marked(mark)[0], signal.SIGKILL)
    until(lambda: not marked(mark))
