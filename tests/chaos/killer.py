"""Kills its own process at the first event that no process of a chain has died at yet.

An event is a call that changes what others can see: fsync, rename, unlink, the making and the copying of files, a call
of MLflow's client, the commit of a transaction below it, a request to Prefect. Its name has no digests and no ids, so
that the same place in the next process has the same name. A process writes the name down, then sends itself SIGKILL.
So each process of a chain gets one event further than the one before, and the chain ends.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIABLE = "TEST_KILLS"  # <file with the names>:<share of events in percent>:<seed>, or <file>:<point>
ROOT = "TEST_KILLS_BELOW"  # folder whose files are watched, if not the home
_TIMES = 2  # an event that comes more often in one process kills at these alone
_ID = re.compile(r"[0-9a-f]{8,}(-[0-9a-f]{4,})*|m-[0-9a-f]{32}|(?<=/tmp)[^/.]+|\.[0-9a-f]{8}(?=\.tmp)")
_CALLS = ((os, "fsync"), (os, "replace"), (os, "rename"), (os, "unlink"), (os, "remove"), (os, "rmdir"), (os, "mkdir"))


class Killer:
    """Knows where the processes of a chain have died; ``share``: percent of events that kill, drawn by ``seed``."""

    def __init__(self, ledger: Path, share: int, seed: int) -> None:
        self._ledger, self._share, self._seed = ledger, share, seed
        self._dead = set(ledger.read_text(encoding="utf-8").splitlines()) if ledger.exists() else set[str]()
        self._counts: Counter[str] = Counter()
        self._process = os.getpid()

    def at(self, kind: str, name: str) -> None:
        """Die here if no process did; a forked child lives on."""
        if os.getpid() != self._process:
            return
        place = f"{kind} {_ID.sub('*', name)}"
        self._counts[place] += 1
        event = f"{place} #{self._counts[place]}"
        if self._counts[place] > _TIMES or event in self._dead or not self._is_drawn(event):
            return
        with self._ledger.open("a", encoding="utf-8") as file:
            file.write(f"{event}\n")
        os.kill(self._process, signal.SIGKILL)

    def _is_drawn(self, event: str) -> bool:
        digest = hashlib.sha256(f"{self._seed} {event}".encode()).digest()
        return int.from_bytes(digest[:4]) % 100 < self._share


def install(folder: Path, plan: str) -> None:
    """Watch the calls of this process, which writes in ``folder``, as ``plan`` says."""
    ledger, *where = plan.split(":")
    if len(where) == 1:
        from tests.chaos import points  # which brings the pipeline

        points.install(Path(ledger), where[0])
        return
    share, seed = where
    killer = Killer(Path(ledger), int(share), int(seed))
    root = str(folder)

    def named(path: Any, folder: int | None) -> str:
        if isinstance(path, int):
            return str(Path(f"/proc/self/fd/{path}").readlink())
        name = os.fsdecode(path)
        return str(Path(f"/proc/self/fd/{folder}").readlink() / name) if folder is not None else name

    def on_file(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def watched(path: Any, *rest: Any, **options: Any) -> Any:
            name = named(rest[0] if call.__name__ in ("replace", "rename") else path, options.get("dir_fd"))
            if name.startswith(root):
                killer.at(call.__name__, name.removeprefix(root))
            return call(path, *rest, **options)

        return watched

    for module, name in (*_CALLS, (shutil, "copyfile")):
        setattr(module, name, on_file(getattr(module, name)))
    _watch_mlflow(killer)
    _watch_prefect(killer)


def _watch_mlflow(killer: Killer) -> None:
    from mlflow import MlflowClient
    from sqlalchemy import Connection, event
    from sqlalchemy.engine import Engine

    def on_call(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def watched(*given: Any, **options: Any) -> Any:
            killer.at("mlflow", name)
            return call(*given, **options)

        return watched

    for name, call in list(vars(MlflowClient).items()):
        if inspect.isfunction(call) and not name.startswith("_"):
            setattr(MlflowClient, name, on_call(name, call))

    last = [""]

    def on_statement(_: Connection, __: Any, statement: str, *___: Any) -> None:
        if not statement.startswith(("SELECT", "PRAGMA")):
            last[0] = " ".join(statement.split()[:3])

    def on_commit(_: Connection) -> None:
        if last[0]:
            killer.at("commit", last[0])
            last[0] = ""

    event.listen(Engine, "before_cursor_execute", on_statement)
    event.listen(Engine, "commit", on_commit)


def _watch_prefect(killer: Killer) -> None:
    import httpx

    def on_request(request: httpx.Request) -> None:
        killer.at("prefect", f"{request.method} {request.url.path}")

    for owner in (httpx.Client, httpx.AsyncClient):
        original = owner.send

        @functools.wraps(original)
        def send(self: Any, request: httpx.Request, *rest: Any, _call: Any = original, **options: Any) -> Any:
            on_request(request)
            return _call(self, request, *rest, **options)

        owner.send = send  # type: ignore[method-assign]
