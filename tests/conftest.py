"""Set-up of all tests: a state folder of their own, and one embedded Prefect API for those marked ``prefect``."""

from __future__ import annotations

import gc
import logging
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests import shapes

gc.disable()  # while millions of objects are made that stay to the end
shapes.install()  # before anything imports rlcore

from rlcore.tasks.store.settings import Home, configure_environment  # noqa: E402 — imports rlcore
from tests import known_sources  # noqa: E402 — imports rlcore

known_sources.install()

_MEMORY = Path("/dev/shm")
_ROOM = 4 << 30  # bytes; all tests together write a tenth of it


def _in_memory() -> Path | None:
    """The folder in memory, where this machine has one with room in which programs may run.

    A run commits to its databases and syncs its files hundreds of times. On a disk, tests wait for that longer than
    they compute; that a process was killed costs no file in either place.
    """
    if not _MEMORY.is_dir() or os.statvfs(_MEMORY).f_flag & os.ST_NOEXEC:
        return None
    free = min(shutil.disk_usage(_MEMORY).free, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return _MEMORY if free >= _ROOM and os.access(_MEMORY, os.W_OK) else None


if folder := _in_memory():
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(folder))  # where pytest makes its temporary folders

# Set before any test module imports Prefect or MLflow; nothing may reach the state of the person who runs the tests.
_SESSION_HOME = Home(Path(tempfile.mkdtemp(prefix="rlcore-tests-", dir=_in_memory())))
for _name in [name for name in os.environ if name.startswith(("PREFECT_", "MLFLOW_", "RLCORE_"))]:
    del os.environ[_name]
configure_environment(_SESSION_HOME)

# On the CPU, also where there is a GPU: bits are compared. tests/gpu has a configuration of its own.
if "ENGINE_PYTHON" not in os.environ:  # `make test-engine` puts vLLM on the GPU
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

# A deadline for each example would measure the machine's other work, not ours.
if hypothesis.settings.get_current_profile_name() == "default":  # tests.mutation.run has one of its own
    # The mutants of the algorithms are killed by 8 examples of each property (docs/benchmarks/checks.md).
    hypothesis.settings.register_profile("rlcore", deadline=None, max_examples=25)
    hypothesis.settings.load_profile("rlcore")

# Warnings are errors here; these come from inside libraries, which we cannot change.
_FOREIGN_WARNINGS = (
    # MLflow 3.17 on SQLAlchemy 2.1: "The ``noload`` loader strategy is deprecated".
    "ignore:The ``noload`` loader strategy is deprecated:DeprecationWarning",
    # cellpylib, which reasoning-gym imports, when Python compiles it for the first time.
    'ignore:"is" with:SyntaxWarning',
    # MLflow's functions for models, about the type hints of its own classes.
    "ignore:.*type hint is inferred as AnyType:UserWarning",
    # bitsandbytes, which MLflow imports by way of peft.
    "ignore:`torch.jit:DeprecationWarning",
    # Hypothesis compares the state of `random` before and after a draw; threads of Prefect and MLflow draw from it too.
    "ignore:Do not use the `random` module inside strategies:hypothesis.errors.HypothesisDeprecationWarning",
    # Prefect 3.7's server tables on SQLAlchemy 2.1: "Type object ... does not refer to an OperatorClass".
    "ignore:Type object <class 'prefect:DeprecationWarning",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--order-seed", type=int, help="take the files of tests in an order that this number decides")
    parser.addoption("--examples", type=int, help="draw so many examples in every property test")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files change places; the tests of a file stay together and in order, for they share what is costly to make."""
    seed = config.getoption("--order-seed")
    if seed is not None:
        files = list(dict.fromkeys(item.path for item in items))
        random.Random(seed).shuffle(files)
        items.sort(key=lambda item: files.index(item.path))
    count = config.getoption("--examples")
    for item in items if count is not None else ():
        function = getattr(item, "obj", None)
        if getattr(function, "is_hypothesis_test", False):
            own = function._hypothesis_internal_use_settings
            function._hypothesis_internal_use_settings = hypothesis.settings(own, max_examples=count)


def pytest_collection_finish() -> None:
    """The collector of garbage need not look at what was imported and collected."""
    gc.freeze()
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts a job in the background with SIGINT ignored, and every process that a test starts would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for line in _FOREIGN_WARNINGS:
        config.addinivalue_line("filterwarnings", line)


def pytest_runtest_setup() -> None:
    shapes.begin_test()


def pytest_unconfigure() -> None:
    shutil.rmtree(_SESSION_HOME.root, ignore_errors=True)


@pytest.fixture(autouse=True)
def _level_of_the_log() -> Iterator[None]:
    """A command that a test runs in this process sets the level for its log; the next test begins without it."""
    log = logging.getLogger("rlcore")
    before = log.level
    yield
    log.setLevel(before)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """An empty state folder, named by ``RLCORE_HOME``; the engine is ``inline`` unless the test says otherwise."""
    made = Home(tmp_path / "home")
    for name in ("RLCORE_HOME", "RLCORE_ENGINE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    configure_environment(made)
    monkeypatch.setenv("RLCORE_ENGINE", "inline")
    return made


@pytest.fixture(scope="session")
def _empty_mlflow_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with MLflow's tables: to make them takes two seconds, to copy them none."""
    from rlcore.tasks.tracking.runs import open_tracker

    home = Home(tmp_path_factory.mktemp("mlflow"))
    previous = os.environ.pop("MLFLOW_TRACKING_URI")
    open_tracker(home)
    os.environ["MLFLOW_TRACKING_URI"] = previous
    return home.root / "mlflow.db"


@pytest.fixture
def tracked_home(home: Home, _empty_mlflow_database: Path) -> Home:
    shutil.copyfile(_empty_mlflow_database, home.root / "mlflow.db")
    return home


@pytest.fixture(scope="session")
def _prefect_api() -> Iterator[None]:
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
    from prefect.testing.utilities import prefect_test_harness

    # Without heartbeats: ending a flow run waits for their thread.
    with (
        prefect_test_harness(server_startup_timeout=180),
        temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}),
    ):
        yield


@pytest.fixture(autouse=True)
def _prefect_when_marked(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("prefect"):
        request.getfixturevalue("_prefect_api")
