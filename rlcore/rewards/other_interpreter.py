"""Function of a module that another interpreter imports, for packages that cannot be installed next to rlcore.

The process begins at the first call. A guard ends it and its children when this process ends. Its environment has no
secrets, and what it prints is read and dropped, except the last lines for the message of a crash.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import IO, Any

from rlcore.errors import ConfigError, RewardError, shown
from rlcore.rewards import interpreter_worker
from rlcore.sampling.vllm import guard

_START_SECONDS = 300.0  # imports, and what the module loads
_PACKAGES_SECONDS = 60.0
_MAX_REPLY_BYTES = 64 << 20
_KEPT = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "HF_HOME", "HF_HUB_OFFLINE")


class FunctionError(Exception):
    """Exception of the function, as text, and the line that raised it."""

    def __init__(self, text: str, where: str) -> None:
        super().__init__(text)
        self.text, self.where = text, where


class OtherFunction:
    """Callable, with the signature of ``module:function``, that calls it in the interpreter ``python``."""

    def __init__(self, kind: str, python: str, path: str) -> None:
        """Read the signature.

        Raises:
            ConfigError: The interpreter does not exist, or cannot import the function.
        """
        try:
            self.__signature__ = _signature(kind, python, str(packages(python, path)))
        except RewardError as error:
            raise ConfigError(
                f"{python} cannot import the function {kind!r}: {error.what}",
                where=f"{path}.kind",
                fix="name a function as module:function, of a module in the current folder or installed for that "
                "interpreter, and install what it imports there",
            ) from error
        self.__name__ = kind.partition(":")[2]
        self._kind, self._python = kind, python
        self._lock = threading.Lock()
        self._process: _Process | None = None

    def __call__(self, **arguments: Any) -> Any:
        """Call the function.

        Raises:
            FunctionError: It raised.
            RewardError: Its process ended.
        """
        with self._lock:
            try:
                if self._process is None:
                    self._process = _Process(self._kind, self._python)
                    self._process.receive()
                self._process.send(arguments)
                return self._process.receive()["values"]
            except RewardError:
                self.close()
                raise

    def close(self) -> None:
        """End the process with all of its children. The next call begins another one."""
        if self._process is not None:
            self._process.stop()
            self._process = None


@lru_cache(maxsize=64)
def _signature(kind: str, python: str, installed: str) -> inspect.Signature:
    """Return the signature of a function, read again if what is ``installed`` changes."""
    process = _Process(kind, python)
    try:
        if not process.replies_within(_START_SECONDS):
            raise RewardError(f"not imported within {_START_SECONDS:.0f} s")
        found = process.receive()["parameters"]
    except FunctionError as error:
        raise RewardError(f"{error.text} ({error.where})") from error
    finally:
        process.stop()
    kinds, no_default = inspect._ParameterKind.__members__, inspect.Parameter.empty
    return inspect.Signature(
        [inspect.Parameter(name, kinds[each], default=None if has else no_default) for name, each, has in found]
    )


def packages(python: str, path: str) -> Mapping[str, str]:
    """Return the versions of the packages of an interpreter; with a digest if they are installed as sources.

    Raises:
        ConfigError: The interpreter does not exist or does not start.
    """
    where = f"{path}.python"
    if shutil.which(python) is None:
        fix = "name the interpreter of a virtual environment that has the packages, such as .venv-env/bin/python"
        raise ConfigError(f"{python!r}: no such program", where=where, fix=fix)
    command = [python, "-I", interpreter_worker.__file__, "packages"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PACKAGES_SECONDS, check=True, env=_environment()
        )
        found: Mapping[str, str] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        said = f": {shown(error.stderr.strip()[-300:])}" if isinstance(error, subprocess.CalledProcessError) else ""
        fix = "name a working interpreter of Python 3.8 or newer"
        raise ConfigError(f"{python!r} does not start: {error}{said}", where=where, fix=fix) from error
    return found


class _Process:
    """Process of the worker, and the socket to it."""

    def __init__(self, kind: str, python: str) -> None:
        near, far = socket.socketpair()
        self._kind, self._python, self._tail = kind, python, deque[bytes](maxlen=4)
        watched = [sys.executable, "-I", guard.__file__, str(os.getpid()), ""]
        module, _, name = kind.partition(":")
        with far:
            self._guard = subprocess.Popen(
                [*watched, python, "-I", interpreter_worker.__file__, "call", module, name],
                stdin=subprocess.DEVNULL,
                stdout=far.fileno(),
                stderr=subprocess.PIPE,
                env=_environment(),
            )
        self._channel = Connection(near.detach())
        assert self._guard.stderr is not None
        self._reader = threading.Thread(target=_read, args=(self._guard.stderr, self._tail), daemon=True)
        self._reader.start()
        self.stop = weakref.finalize(self, _stop, self._guard, self._channel)

    def send(self, message: Mapping[str, Any]) -> None:
        with self._ended():
            self._channel.send_bytes(json.dumps(message).encode())

    def replies_within(self, seconds: float) -> bool:
        """Return True once there is a reply, or the process has ended."""
        return self._channel.poll(seconds)

    def receive(self) -> Mapping[str, Any]:
        with self._ended():
            reply: Mapping[str, Any] = json.loads(self._channel.recv_bytes(_MAX_REPLY_BYTES))
        if "error" in reply:
            raise FunctionError(reply["error"], reply["where"])
        return reply

    @contextmanager
    def _ended(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError, ValueError) as error:
            self.stop()
            self._reader.join(5.0)
            last = b"".join(self._tail).decode(errors="replace").strip()[-600:]
            what = f"the process of the reward function {self._kind!r} ended (status {self._guard.returncode})"
            raise RewardError(
                f"{what}; it printed last: {shown(last, max_chars=600) or 'nothing'}",
                where=self._python,
                fix="see the lines above; a reward function that crashes for some completions cannot train",
            ) from error


def _read(stream: IO[bytes], tail: deque[bytes]) -> None:
    with stream:
        while block := os.read(stream.fileno(), 1 << 14):
            tail.append(block)


def _stop(process: subprocess.Popen[bytes], channel: Connection) -> None:
    process.terminate()
    process.wait()  # the guard ends all descendants, at the latest with SIGKILL
    channel.close()


def _environment() -> dict[str, str]:
    """Return the variables of the process: no secrets, because it computes with what a model wrote."""
    return {name: os.environ[name] for name in _KEPT if name in os.environ} | {"LANG": "C.UTF-8"}
