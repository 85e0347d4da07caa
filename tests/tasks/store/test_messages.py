"""Texts for users: findings of the doctor, errors in logs, a full disk, and text in Markdown."""

from __future__ import annotations

import errno
import logging
import shutil
import socket
import sqlite3
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement

from rlcore.config import HardwareConfig
from rlcore.errors import ConfigError, DataError, StorageError
from rlcore.extras import install_command
from rlcore.flows.cli.app import main
from rlcore.tasks.operations import doctor
from rlcore.tasks.operations.doctor import GIB, DoctorCheck
from rlcore.tasks.store.markdown import code, code_cell, on_terminal, plain
from rlcore.tasks.store.settings import Home, UserErrors, shorten_user_errors
from rlcore.tasks.store.storage import flatten, is_full_disk, raise_on_full_disk
from tests.markup import ATTACK, assert_is_text, read_markdown


class Healthy(BaseHTTPRequestHandler):
    """A server that is well below ``/api``, and nowhere else, and lets the user in whose password is ``p``."""

    clients: ClassVar[set[str | None]] = set()  # the proxy's header of the requests

    def do_GET(self) -> None:
        self.clients.add(self.headers["X-Client"])
        known = {"/api/health": 200, "/api/version": 200 if self.headers["Authorization"] == "Basic dTpw" else 401}
        self.send_response(known.get(self.path, 503))
        self.end_headers()

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def served() -> Iterator[str]:
    """Its address."""
    with HTTPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def unserved() -> str:
    """An address where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_the_doctor_prints_every_finding_and_its_exit_code_follows_the_errors(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        doctor, "sandbox", lambda: DoctorCheck(subject="sandbox", state="absent", text="none", fix="get one")
    )
    assert main(["doctor"]) == 0
    words = capsys.readouterr().out
    subjects = ("python", "packages", "device", "cores", "memory", "disk", "flow engine", "Prefect server")
    assert [
        each for each in (*subjects, "MLflow server", "sandbox", "rollout engines", "extras") if each not in words
    ] == []
    assert words.endswith("the demo can run: rlcore run\n")

    monkeypatch.setenv("RLCORE_ENGINE", "none")
    assert main(["doctor"]) == 1
    words = capsys.readouterr().out
    assert "MISSING  flow engine         unknown engine 'none'" in words
    assert words.endswith("1 of these keep the demo from running\n")


def test_a_missing_and_an_old_library_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.packages().state == "ok"
    monkeypatch.setattr(doctor, "requirements", lambda *_: [Requirement("no-such-library>=1"), Requirement("numpy<1")])
    found = doctor.packages()
    assert found.state == "missing"
    assert found.text.startswith("no-such-library is missing; numpy is ")
    assert found.text.endswith(", not <1")
    assert found.fix.startswith("make ")

    monkeypatch.setattr(doctor, "make_command", lambda _: "")  # not a checkout
    assert doctor.packages().fix == install_command("pipeline")
    extras = doctor.extras()
    assert (extras.state, "make" in extras.fix) == ("absent", False)
    assert extras.fix.endswith(install_command("gguf"))


def test_a_missing_gpu_is_an_error_and_a_cpu_is_fine() -> None:
    assert doctor.device(HardwareConfig(device="cuda")).state == "missing"
    assert doctor.device().text.startswith("device=cpu precision=float32 instructions=")


def test_too_little_memory_or_disk_is_an_error(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    for free, state in ((GIB // 2, "missing"), (8 * GIB, "ok")):
        monkeypatch.setattr("rlcore.hardware.memory.free_bytes", lambda _, free=free: free)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        assert (doctor.memory().state, doctor.disk(home).state) == (state, state)


def test_a_server_answers_or_is_an_error(served: str, unserved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "u:p")
    monkeypatch.setenv("PREFECT_CLIENT_CUSTOM_HEADERS", '{"X-Client": "t"}')
    Healthy.clients.clear()
    for url, state in ((f"{served}/api", "ok"), (served, "missing"), (unserved, "missing"), ("http://[", "missing")):
        monkeypatch.setenv("PREFECT_API_URL", url)
        assert doctor.server("Prefect", "PREFECT_API_URL", "embedded").state == state
    assert Healthy.clients == {"t"}
    monkeypatch.setenv("PREFECT_API_URL", f"{served}/api")
    assert doctor.server("Prefect", "PREFECT_API_URL", "").text == f"{served}/api answers 200 to the user u"
    monkeypatch.delenv("PREFECT_API_URL")
    assert doctor.server("Prefect", "PREFECT_API_URL", "embedded").text == "embedded"


def test_a_server_with_another_password_is_an_error(served: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", f"{served}/api")
    for known, whom in {"": "us", "u:old": "the user u"}.items():
        monkeypatch.setenv("PREFECT_API_AUTH_STRING", known)
        found = doctor.server("Prefect", "PREFECT_API_URL", "embedded")
        assert (found.state, f"does not let {whom} in (401)" in found.text) == ("missing", True)
        assert "clients.env" in found.fix


def test_a_broken_library_is_an_error_without_a_traceback(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> DoctorCheck:
        raise ImportError("no module named torch")

    monkeypatch.setattr(doctor, "device", fail)
    shown = [each.text for each in doctor.run_checks(home) if each.state == "missing"]
    assert shown == ["no module named torch"]


def logged(error: Exception, name: str = "prefect.flow_runs") -> str:
    shorten_user_errors()
    shorten_user_errors()
    logger = logging.getLogger(name)
    # Prefect's own logging set-up adds filters of its own to the same loggers.
    assert sum(isinstance(each, UserErrors) for each in logger.filters) == 1
    try:
        raise error
    except type(error):
        raised = sys.exc_info()
    record = logger.makeRecord(name, logging.ERROR, __file__, 1, "Encountered exception: %r", (error,), raised)
    assert logger.filter(record)  # not through the logger's parents, whose set-up depends on who ran before
    return logging.Formatter().format(record)


def test_an_error_of_ours_is_its_message_without_a_traceback() -> None:
    text = logged(DataError("row 3 has no prompt", where="a.jsonl"))
    assert "DataError: row 3 has no prompt\n  where: a.jsonl" in text
    assert "Traceback" not in text


def test_a_full_disk_is_reported_without_a_traceback() -> None:
    text = logged(OSError(errno.ENOSPC, "No space left on device"), name="mlflow.store.db.utils")
    assert "the disk is full (OSError)" in text
    assert "Traceback" not in text


def test_an_error_that_is_nobodys_mistake_keeps_its_traceback() -> None:
    assert "Traceback" in logged(ZeroDivisionError("a bug"))


def caused_by(reason: BaseException, *, shown: bool) -> RuntimeError:
    """An error raised from another, or while another was handled."""
    try:
        try:
            raise reason
        except type(reason) as first:
            if shown:
                raise RuntimeError("cannot write") from first
            raise RuntimeError("cannot write")  # noqa: B904 — the context alone says why
    except RuntimeError as error:
        return error


def full_database() -> sqlite3.Error:
    """Return SQLite's error for a database that may not grow."""
    connection = sqlite3.connect(":memory:")
    connection.execute("PRAGMA max_page_count = 2")
    try:
        connection.execute("CREATE TABLE t (x)")
        connection.execute("INSERT INTO t VALUES (zeroblob(100000))")
    except sqlite3.Error as error:
        return error
    finally:
        connection.close()
    raise AssertionError("the database took it")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "no space"),
        OSError(errno.EDQUOT, "quota"),
        full_database(),
        RuntimeError("(sqlite3.OperationalError) database or disk is full"),
        RuntimeError("SafetensorError: I/O error: No space left on device (os error 28)"),
        caused_by(OSError(errno.ENOSPC, "no space"), shown=True),
        caused_by(OSError(errno.ENOSPC, "no space"), shown=False),
    ],
)
def test_a_full_disk_is_known_in_each_of_its_forms(error: BaseException, tmp_path: Path) -> None:
    assert is_full_disk(error)
    with pytest.raises(StorageError, match="the disk is full") as caught, raise_on_full_disk(tmp_path):
        raise error
    assert caught.value.where == str(tmp_path)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EACCES, "permission denied"),
        ValueError("full of water"),
        ConfigError("No space left on device is only quoted here", fix="none"),
    ],
)
def test_another_error_stays_what_it_is(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as caught, raise_on_full_disk(tmp_path):
        raise error
    assert caught.value is error
    assert is_full_disk(error) is isinstance(error, ConfigError)  # by its words, which are an error's of ours


TEXTS = st.text(alphabet="ab <>&;#`*_[]()|\\~!-+.:/\n\"'", max_size=30) | st.sampled_from(
    ["&lt;", "&amp;lt;", "\\&lt;"]
)


def test_names_are_no_markdown() -> None:
    assert plain("a_b *c*\n# d <i> & e") == r"a\_b \*c\* \# d &lt;i&gt; &amp; e"
    assert code("a`b\nc") == "`` a`b c ``"
    assert code("a``b") == "``` a``b ```"
    assert code_cell("a|b") == r"`a\|b`"
    assert plain("a\x1b[2Jb\x00") == "a\ufffd\\[2Jb\ufffd"


def test_an_attack_is_text_in_a_line_and_in_a_table() -> None:
    for write in (plain, code):
        assert_is_text(f"said: {write(ATTACK)}\n", count=1)
    for write in (plain, code_cell):
        assert_is_text(f"| a | b |\n|---|---|\n| {write(ATTACK)} | {write(ATTACK)} |\n", count=2)


@given(TEXTS)
def test_a_reader_and_a_terminal_see_the_text_itself(text: str) -> None:
    line = " ".join(text.split())
    assert on_terminal(plain(text)) == line
    assert read_markdown(f"x{plain(text)}x\n").text == f"x{line}x"
    if line:
        assert read_markdown(f"x{code(text)}x\n").text == f"x{line}x"


@pytest.mark.parametrize(
    ("nested", "flat"),
    [
        ({"a": 1, "b": {"c": 2, "d": {"e": 3}}}, {"a": 1, "b.c": 2, "b.d.e": 3}),
        ({"rewards": [{"weight": 1}, {"weight": 2}]}, {"rewards.0.weight": 1, "rewards.1.weight": 2}),
        ({"rewards": ({"weight": 1}, 5)}, {"rewards.0.weight": 1, "rewards.1": 5}),
        ({"betas": [0.9, 0.95], "none": None}, {"betas": [0.9, 0.95], "none": None}),  # a list of numbers is a value
        ({"a": {"b": {}}, "c": []}, {"a.b": {}, "c": []}),  # what is empty is not lost
        ({}, {}),
    ],
)
def test_a_path_names_each_value(nested: object, flat: dict[str, object]) -> None:
    assert flatten(nested) == flat
