"""A process that has imported what a command needs, and forks for each: imports are most of what a micro run costs.

The forked child is what ``python -m rlcore.flows`` would be, with its own environment, folder and exit. Tests that
kill a run, or look at how it starts, start a process themselves. The workers of a test run share the process: it forks
for each of them, and that fork for each of its commands.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TextIO, TypedDict

from filelock import FileLock

from tests.chaos import killer
from tests.processes import wait_for_line

ROOT = Path(__file__).resolve().parents[2]
SOCKET = "socket"
_STARTED: list[subprocess.Popen[str]] = []  # the warm process, where this worker has started it

# What a run imports, the last of it only when it is used.
NEEDED = (
    "rlcore.flows.cli.app",
    "rlcore.flows.flows",
    "tests.chaos.toy",
    "rlcore.tasks.run.live_view",
    "rlcore.tasks.report.summary",
    "mlflow.store.tracking.sqlalchemy_store",
    "mlflow.store.model_registry.sqlalchemy_store",
    "mlflow.transformers",
    "mlflow.pyfunc",
    "transformers.pipelines",
    "peft",
    "transformers.models.llama.modeling_llama",
    "pandera.backends.pandas.register",
    "pandera.strategies.pandas_strategies",
    "pyarrow.dataset",
    "git",
    "mlflow.tracing.export.mlflow_v3",
    "sqlalchemy.dialects.sqlite",
    "matplotlib.backends.backend_svg",
    "matplotlib.backends.backend_agg",
)


class Request(TypedDict):
    """Task of a child process; ``outputs``: files of its output and errors; ``call``: the function to run."""

    arguments: list[str]
    env: dict[str, str]
    cwd: str
    outputs: list[str]
    call: str


def run_warm(
    arguments: Sequence[str], env: Mapping[str, str], cwd: Path, *, call: str = "rlcore.flows.cli.app:main"
) -> subprocess.CompletedProcess[str]:
    """``python -m rlcore.flows ARGUMENTS`` in a fork of the warm process, or another function of arguments."""
    server = _connect()
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / name for name in ("stdout", "stderr")]
        request: Request = {
            "arguments": list(arguments), "env": dict(env), "cwd": str(cwd), "outputs": [*map(str, outputs)],
            "call": call,
        }  # fmt: skip
        server.write(json.dumps(request) + "\n")
        server.flush()
        answer = server.readline()
        assert answer, "the warm process has died"
        stdout, stderr = (path.read_text(encoding="utf-8") for path in outputs)
    return subprocess.CompletedProcess(list(arguments), int(answer), stdout, stderr)


@cache
def _connect() -> TextIO:
    """A fork of the warm process; the first worker that asks for one starts it."""
    name = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    folder = Path(tempfile.gettempdir()) / f"rlcore-warm-{name}"
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"), socket.socket(socket.AF_UNIX) as connection:
        if connection.connect_ex(str(folder / SOCKET)):
            (folder / SOCKET).unlink(missing_ok=True)
            command = [sys.executable, "-m", "tests.flows.warm", str(folder)]
            quiet = subprocess.DEVNULL
            _STARTED.append(subprocess.Popen(command, stdin=quiet, stdout=subprocess.PIPE, text=True, cwd=ROOT))
            atexit.register(_leave, _STARTED[-1])
            wait_for_line(_STARTED[-1], "ready")
            connection.connect(str(folder / SOCKET))
        return connection.makefile("rw")


def _leave(process: subprocess.Popen[str]) -> None:
    """Forget the warm process, which ends by itself when the last worker has gone."""
    assert process.stdout is not None
    process.stdout.close()
    process.returncode = 0


def serve(folder: Path) -> None:
    """Fork for each worker, until the last one has gone."""
    gc.disable()
    for module in NEEDED:
        importlib.import_module(module)
    _look_ahead()
    _in_child(lambda: _make_database(folder))
    gc.collect()
    gc.freeze()  # or each child copies what the collector looks at
    gc.enable()
    workers = 0
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / SOCKET))
        listener.listen()
        listener.settimeout(1.0)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while not workers or _has_children():
            with contextlib.suppress(TimeoutError):
                connection, _ = listener.accept()
                workers += 1
                if os.fork() == 0:
                    listener.close()
                    _answer(connection.makefile("rw"), folder)
                    os._exit(0)
                connection.close()
    shutil.rmtree(folder, ignore_errors=True)


def _has_children() -> bool:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def _answer(requests: TextIO, folder: Path) -> None:
    """Fork for each request; answer with the child's exit code."""
    for line in requests:
        request = json.loads(line)

        def run(request: Request = request) -> int:
            _become(request, folder / "mlflow.db")
            module, _, function = request["call"].partition(":")
            return int(getattr(importlib.import_module(module), function)(request["arguments"]))

        requests.write(f"{_in_child(run)}\n")
        requests.flush()


def _look_ahead() -> None:
    """Read what every command reads once: sources for keys, kept by what a file holds, packages, fonts and tables."""
    from matplotlib.figure import Figure
    from mlflow.utils.requirements_utils import _init_modules_to_packages_map
    from sqlalchemy.orm import configure_mappers

    from rlcore.flows.presets import open_preset
    from rlcore.flows.stages import stages
    from rlcore.tasks.keys.cache_keys import function_of
    from rlcore.tasks.keys.key_inputs import key_inputs
    from rlcore.tasks.store.code_hash import pins
    from tests import known_sources

    known_sources.install()
    config = open_preset("tiny", ())
    for stage in stages(config):
        key_inputs(stage, config, {})
        for each in filter(None, (function_of(stage.run)[0], getattr(stage.render_page, "__module__", ""))):
            importlib.import_module(each)
    pins()
    _init_modules_to_packages_map()
    configure_mappers()
    Figure(layout="constrained").subplots(2, 2)[0, 0].figure.savefig(io.BytesIO())


def _in_child(work: Callable[[], int | None]) -> int:
    """The exit code of a fork that works, and ends as any command but for what takes it three seconds.

    Those are the tearing down of two thousand modules, which are the parent's, and do not differ between commands.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = work() or 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:  # noqa: BLE001 - as the interpreter does
            traceback.print_exc()
        threading._shutdown()  # type: ignore[attr-defined]  # waits for the threads that are no daemons
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def _make_database(folder: Path) -> None:
    """An empty MLflow database: to make its tables costs seconds."""
    from rlcore.tasks.store.settings import Home, configure_environment
    from rlcore.tasks.tracking.runs import open_tracker

    logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    configure_environment(Home(folder))
    open_tracker(Home(folder))


def _become(request: Request, database: Path) -> None:
    """Take the environment, folder and streams of the request; a home without a database gets the empty one."""
    from prefect.context import refresh_global_settings_context

    from rlcore.tasks.store.settings import configure_environment, find_home

    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.path.insert(0, request["cwd"])
    for number, path in enumerate((os.devnull, *request["outputs"])):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), number)
    home = Path(request["env"]["RLCORE_HOME"])
    if not (home / database.name).exists() and "TEST_NO_DATABASE" not in os.environ:
        with contextlib.suppress(OSError):  # a home that cannot be written is what a test is about
            home.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(database, home / database.name)
    if (
        os.environ.get("RLCORE_ENGINE") != "inline"
    ):  # Prefect, which reads its settings as it is imported, and that was before
        configure_environment(find_home())
        refresh_global_settings_context()
    if plan := os.environ.get(killer.VARIABLE):
        killer.install(Path(os.environ.get(killer.ROOT, home)), plan)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
