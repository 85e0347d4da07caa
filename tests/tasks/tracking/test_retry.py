"""A locked database and a server that is away are waited for; any other error is raised at once."""

from __future__ import annotations

import logging
import sqlite3

import pytest
from mlflow.exceptions import MlflowException

from rlcore.errors import ServiceError
from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking import retry
from rlcore.tasks.tracking.retry import retry_while_unavailable, unavailable_reason
from rlcore.tasks.tracking.runs import open_tracker


class Clock:
    """Time that passes when somebody sleeps."""

    def __init__(self) -> None:
        self.now, self.pauses = 0.0, list[float]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.pauses.append(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(retry, "time", made)
    return made


def test_a_call_is_tried_again_with_longer_and_longer_pauses_and_says_so(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    def call() -> str:
        if clock.now < 40.0:
            raise sqlite3.OperationalError("database is locked")
        return "there"

    with caplog.at_level(logging.WARNING):
        assert retry_while_unavailable(call) == "there"
    assert clock.pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0]
    assert "another process keeps MLflow's database locked: retry after 31 s" in caplog.text


def test_after_ten_minutes_it_is_an_error_that_says_what_to_do(clock: Clock) -> None:
    def call() -> None:
        raise ConnectionError("HTTPConnectionPool: Max retries exceeded with url")

    with pytest.raises(ServiceError, match=r"(?s)server does not answer, for 10 minutes now.*rerun the command"):
        retry_while_unavailable(call)
    assert 600.0 < clock.now < 700.0


def test_any_other_error_is_raised_at_once(clock: Clock) -> None:
    def call() -> None:
        raise ValueError("no such run")

    with pytest.raises(ValueError, match="no such run"):
        retry_while_unavailable(call)
    assert clock.pauses == []
    assert unavailable_reason(ValueError("no such run")) == ""


def test_the_client_waits_for_a_database_that_another_connection_has_locked(
    tracked_home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = open_tracker(tracked_home)
    other = sqlite3.connect(tracked_home.root / "mlflow.db", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN EXCLUSIVE")
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        other.execute("COMMIT")

    monkeypatch.setattr(retry.time, "sleep", sleep)
    original = sqlite3.connect

    def impatient(*args: object, **options: object) -> sqlite3.Connection:
        return original(*args, **{**options, "timeout": 0.0})  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(sqlite3, "connect", impatient)
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    def at_once(
        conn: object, cursor: object, statement: str, parameters: object, context: object, many: bool
    ) -> object:
        return statement.replace("busy_timeout = 20000", "busy_timeout = 0"), parameters

    event.listen(Engine, "before_cursor_execute", at_once, retval=True)
    try:
        run = tracker.start_run("toy", "waits", tags={})
    finally:
        event.remove(Engine, "before_cursor_execute", at_once)
        other.close()
    assert pauses == [1.0]
    assert tracker.client.get_run(run.run_id).info.status == "RUNNING"


@pytest.mark.parametrize(("code", "text"), [(401, "does not know the user ben"), (403, "does not allow this to the u")])
def test_a_refused_user_is_named_at_once(clock: Clock, monkeypatch: pytest.MonkeyPatch, code: int, text: str) -> None:
    def call() -> None:
        raise MlflowException(f"API request to endpoint /x failed with error code {code} != 200. Response body: ''")

    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "ben")
    with pytest.raises(ServiceError, match=text):
        retry_while_unavailable(call)
    assert clock.pauses == []
