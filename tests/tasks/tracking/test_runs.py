"""Runs in MLflow: curves, files, views, and calls that are repeated while the server is away."""

from __future__ import annotations

import json
import logging
import os
import signal
import sqlite3
import subprocess
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_ALREADY_EXISTS, RESOURCE_DOES_NOT_EXIST

from rlcore.errors import ServiceError
from rlcore.tasks.store.settings import Home, find_home
from rlcore.tasks.tracking import retry
from rlcore.tasks.tracking.mlflow_model import local_path
from rlcore.tasks.tracking.retry import ignore_existing, none_if_missing, retry_while_unavailable, unavailable_reason
from rlcore.tasks.tracking.runs import (
    MAX_WAITING,
    PARENT_TAG,
    RunTracker,
    Tracker,
    open_tracker,
    results_links,
    results_page,
    save_results_view,
)
from tests.flows.conftest import environment
from tests.flows.warm import run_warm
from tests.waiting import LONG


@pytest.fixture
def tracker(tracked_home: Home) -> Tracker:
    return open_tracker(tracked_home)


def start(tracker: Tracker, name: str = "stage", parent: str = "") -> RunTracker:
    return tracker.start_run("tiny/grpo", name, tags={"stage": name}, parent=parent)


def history(tracker: Tracker, run: RunTracker, name: str) -> list[tuple[int, float]]:
    return [(metric.step, metric.value) for metric in tracker.client.get_metric_history(run.run_id, name)]


def test_metrics_parameters_and_tags_of_a_run_can_be_read_back(tracker: Tracker) -> None:
    with start(tracker) as run:
        run.log_params({"sft": {"learning_rate": 0.1}, "text": "x" * 600})
        run.log_params({"section": {f"p{i}": i for i in range(250)}})  # more than one call takes
        run.set_tags({"colour": "red"})
        run.log_metrics({"loss": 2.0}, step=1)
        run.log_metrics({"loss": 1.0}, step=2)
    data = tracker.client.get_run(run.run_id).data
    assert len(data.params) == 252
    assert data.params.items() >= {"sft.learning_rate": "0.1", "text": "x" * 500}.items()
    assert data.tags["colour"] == "red"
    assert history(tracker, run, "loss") == [(1, 2.0), (2, 1.0)]
    assert tracker.client.get_run(run.run_id).info.status == "FINISHED"


def test_a_reopened_run_belongs_to_its_new_parent_and_drops_the_steps_that_it_has_already(tracker: Tracker) -> None:
    first = start(tracker, parent=start(tracker, "old").run_id)
    for step in (1, 2, 3):
        first.log_metrics({"reward": float(step)}, step=step)
    first.end("KILLED")  # after its checkpoint of step 1
    parent = start(tracker, "new")
    again = tracker.reopen_run(first.run_id, parent=parent.run_id)
    assert again is not None
    stored = tracker.client.get_run(first.run_id)
    assert (stored.info.status, stored.data.tags[PARENT_TAG]) == ("RUNNING", parent.run_id)
    for step in (2, 3, 4):
        again.log_metrics({"reward": 10.0 * step, "new": 1.0}, step=step)
    again.end("FINISHED")
    assert history(tracker, again, "reward") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    assert history(tracker, again, "new") == [(2, 1.0), (3, 1.0), (4, 1.0)]


def test_a_run_that_mlflow_no_longer_has_cannot_be_reopened(tracker: Tracker) -> None:
    assert tracker.reopen_run("0" * 32) is None
    assert tracker.kill_runs("0" * 32) == 0


def test_the_summary_of_a_stage_adds_no_point_to_a_curve(tracker: Tracker) -> None:
    run = start(tracker)
    run.log_metrics({"reward": 1.0}, step=5)
    run.log_summary({"reward": 1.0, "memory": 2.0})
    run.flush()
    assert history(tracker, run, "reward") == [(5, 1.0)]
    assert history(tracker, run, "memory") == [(0, 2.0)]


def test_a_failed_run_says_why_and_an_interrupted_one_is_killed(tracker: Tracker) -> None:
    failed, killed = start(tracker), start(tracker)
    with pytest.raises(ValueError, match="boom"), failed:
        raise ValueError("boom")
    with pytest.raises(KeyboardInterrupt), killed:
        raise KeyboardInterrupt
    stored = tracker.client.get_run(failed.run_id)
    assert (stored.info.status, stored.data.tags["error"]) == ("FAILED", "ValueError: boom")
    tracker.reopen_run(failed.run_id)
    assert "error" not in tracker.client.get_run(failed.run_id).data.tags
    assert tracker.client.get_run(killed.run_id).info.status == "KILLED"


def test_killing_a_pipeline_ends_its_running_stages_and_leaves_the_finished_ones(tracker: Tracker) -> None:
    parent = start(tracker, "pipeline")
    done, open_ = start(tracker, "a", parent.run_id), start(tracker, "b", parent.run_id)
    done.end("FINISHED")
    assert tracker.kill_runs(parent.run_id) == 2
    statuses = [tracker.client.get_run(run.run_id).info.status for run in (parent, done, open_)]
    assert statuses == ["KILLED", "FINISHED", "KILLED"]
    assert tracker.kill_runs(parent.run_id) == 0


def test_what_is_logged_of_a_model_adds_no_point_to_the_curves_of_its_run_however_often(tracker: Tracker) -> None:
    run = start(tracker)
    run.log_metrics({"reward": 1.0}, step=4)
    run.log_metrics({"reward": 2.0}, step=5)
    run.log_summary({"memory": 3.0})
    run.flush()
    model = tracker.client.create_logged_model(run.experiment_id, name="policy", source_run_id=run.run_id)
    for _ in range(2):
        run.log_model_metrics(model.model_id, {"reward": 2.0, "memory": 3.0})
    assert history(tracker, run, "reward") == [(4, 1.0), (5, 2.0)]
    assert history(tracker, run, "memory") == [(0, 3.0)]
    found = tracker.client.get_logged_model(model.model_id).metrics or []
    assert sorted((metric.key, metric.step, metric.value) for metric in found) == [
        ("memory", 0, 3.0),
        ("reward", 5, 2.0),
    ]


def test_a_dataset_is_logged_under_the_digest_of_its_bytes(tracker: Tracker, tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    parquet.write_table(pa.table({"prompt_id": ["a", "b"], "tokens": [[1], [2, 3]]}), path)
    run = start(tracker)
    run.log_dataset(path, name="verifiable_prompts/v1", context="train")
    (entry,) = tracker.client.get_run(run.run_id).inputs.dataset_inputs
    digest = subprocess.run(["sha256sum", str(path)], capture_output=True, text=True, check=True).stdout[:64]
    assert entry.dataset.digest == digest[:36]
    assert {tag.key: tag.value for tag in entry.tags} == {"mlflow.data.context": "train", "sha256": digest}
    assert entry.dataset.profile == '{"num_rows": 2}'


def test_the_url_of_a_run_needs_a_server(tracker: Tracker, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start(tracker)
    assert run.url == ""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:5000/")
    assert run.url == f"http://localhost:5000/#/experiments/{run.experiment_id}/runs/{run.run_id}"


def log_and_die(_: Sequence[str]) -> int:
    """Log two hundred metrics, flush them and die: for the warm process."""
    run = open_tracker(find_home()).start_run("kills", "run", tags={})
    for step in range(200):
        run.log_metrics({"a": step, "b": -step}, step=step)
    run.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


@pytest.mark.slow  # the process of the kill imports for seconds; reopened runs and failed writes are fast
def test_no_flushed_metric_is_lost_to_a_kill(tracked_home: Home) -> None:
    done = run_warm([], environment(tracked_home.root), tracked_home.root, call=f"{__name__}:log_and_die")
    assert done.returncode == -signal.SIGKILL, done.stderr
    client = open_tracker(tracked_home).client
    experiment = client.get_experiment_by_name("kills")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    for name in ("a", "b"):
        assert len(client.get_metric_history(run.info.run_id, name)) == 200


def test_a_write_that_failed_is_an_error_of_the_flush_and_nothing_is_written_after_the_gap(tracker: Tracker) -> None:
    run = start(tracker)
    run.log_metrics({"loss": 1.0}, step=1)
    run.flush()
    run.log_metrics({"no: such? name": 1.0}, step=2)  # which MLflow refuses
    with pytest.raises(MlflowException, match="no: such"):
        run.flush()
    run.log_metrics({"loss": 3.0}, step=3)
    with pytest.raises(MlflowException, match="no: such"):
        run.end("FINISHED")
    assert history(tracker, run, "loss") == [(1, 1.0)]
    assert tracker.client.get_run(run.run_id).info.status == "FAILED"


def test_what_waits_behind_a_failed_write_is_dropped_and_every_call_says_why(tracker: Tracker) -> None:
    run, may_go, done = start(tracker), threading.Event(), list[int]()

    def fail() -> None:
        may_go.wait()
        raise OSError("the server is gone")

    run.in_background(fail)
    run.in_background(partial(done.append, 1))
    may_go.set()
    for call in (run.flush, partial(run.in_background, partial(done.append, 2)), run.flush):
        with pytest.raises(OSError, match="the server is gone"):
            call()
    assert done == []


def test_a_loop_waits_only_when_too_many_writes_do(tracker: Tracker) -> None:
    run, may_go = start(tracker), threading.Event()
    try:
        for _ in range(MAX_WAITING):
            run.in_background(may_go.wait)  # none of them is done before may_go
        one_more = threading.Thread(target=run.in_background, args=(may_go.wait,))
        one_more.start()
        one_more.join(0.2)
        assert one_more.is_alive()
    finally:
        may_go.set()
    one_more.join(LONG)
    assert not one_more.is_alive()
    run.flush()


def test_a_loop_does_not_wait_for_the_database(tracker: Tracker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlcore.tasks.tracking.runs._WRITE_SECONDS", 0.0)  # every call writes
    write, threads = tracker.client.log_batch, set()

    def slowly(*args: object, **kwargs: object) -> object:
        threads.add(threading.get_ident())
        return write(*args, **kwargs)

    monkeypatch.setattr(tracker.client, "log_batch", slowly)
    with start(tracker) as run:
        for step in range(40):
            run.log_metrics({"loss": float(step)}, step=step)
            tracker.client.set_tag(run.run_id, "step", str(step))  # the loop's own thread writes meanwhile
    assert history(tracker, run, "loss") == [(step, float(step)) for step in range(40)]
    assert threading.get_ident() not in threads


def test_a_logged_file_lies_once_and_the_next_of_its_name_replaces_it(tracked_home: Home, tmp_path: Path) -> None:
    tracker = open_tracker(tracked_home)
    run = tracker.start_run("toy", "toy", tags={})
    folder = tmp_path / "tables"
    (folder / "inner").mkdir(parents=True)
    (folder / "a.txt").write_text("1")
    (folder / "inner" / "b.txt").write_text("2")
    for _ in range(2):  # the second time each has this name already
        run.log_artifact(folder / "a.txt", "one")
        run.log_artifact(folder, "all")
    place = local_path(tracker.client.get_run(run.run_id).info.artifact_uri)
    assert place is not None
    names = sorted(path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file())
    assert names == ["all/a.txt", "all/inner/b.txt", "one/a.txt"]
    assert (place / "one" / "a.txt").samefile(folder / "a.txt")
    (folder / "other.txt").write_text("3")
    (folder / "other.txt").rename(folder / "a.txt")
    run.log_artifact(folder / "a.txt", "one")
    assert [(place / name / "a.txt").read_text() for name in ("one", "all")] == ["3", "1"]


def test_a_server_gets_copies(tracked_home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, str]] = []
    run = open_tracker(tracked_home).start_run("toy", "toy", tags={})
    for name in ("log_artifact", "log_artifacts"):
        monkeypatch.setattr(MlflowClient, name, lambda _, run, path, folder: sent.append((path, folder)))
    monkeypatch.setattr("rlcore.tasks.tracking.mlflow_model.local_path", lambda location: None)
    (tmp_path / "a.txt").write_text("1")
    run.log_artifact(tmp_path / "a.txt", "one")
    run.log_artifact(tmp_path, "all")
    assert sent == [(str(tmp_path / "a.txt"), "one"), (str(tmp_path), "all")]
    assert local_path("mlflow-artifacts:/1/x") is None


def started(tracker: Tracker, preset: str) -> RunTracker:
    return tracker.start_run(preset, "run", tags={})


def view(run: RunTracker) -> dict[str, object]:
    tags = run.client.get_experiment(run.experiment_id).tags
    (tag,) = [text for name, text in tags.items() if name.startswith("mlflow.sharedViewState.")]
    return dict(json.loads(tag))


def test_the_view_names_its_columns_and_follows_their_change(tracker: Tracker) -> None:
    tiny = started(tracker, "tiny")
    save_results_view(tiny, ["accuracy/sft", "reward/mean"])
    first = view(tiny)
    assert first["name"] == "Results"
    assert json.loads(str(first["state"])) == {"selectedColumns": ["metrics.`accuracy/sft`", "metrics.`reward/mean`"]}
    save_results_view(tiny, ["accuracy/sft", "reward/mean"])
    assert view(tiny) == first
    save_results_view(tiny, ["accuracy/grpo"])
    assert json.loads(str(view(tiny)["state"])) == {"selectedColumns": ["metrics.`accuracy/grpo`"]}
    save_results_view(tiny, [f"accuracy/a_stage_with_quite_a_long_name_{number}" for number in range(500)])
    assert len(json.loads(str(view(tiny)["state"]))["selectedColumns"]) == 50  # which fit into a tag


def test_a_view_that_a_user_has_changed_stays(tracker: Tracker) -> None:
    tiny = started(tracker, "tiny")
    save_results_view(tiny, ["accuracy/sft"])
    changed = view(tiny) | {"updatedAt": 4102444800000, "state": '{"selectedColumns": ["params.`seed`"]}'}
    tiny.client.set_experiment_tag(tiny.experiment_id, "mlflow.sharedViewState.results", json.dumps(changed))
    save_results_view(tiny, ["accuracy/grpo"])
    assert view(tiny) == changed


def test_presets_with_a_view_are_compared(tracker: Tracker, tracked_home: Home) -> None:
    tiny, mine = started(tracker, "tiny"), started(tracker, "mine")
    started(tracker, "of another team")
    assert results_page(tracked_home) == ""
    save_results_view(tiny, ["reward/mean"])
    assert "compare" not in results_links(tiny)
    assert results_page(tracked_home) == f"#/experiments/{tiny.experiment_id}/runs?viewStateShareKey=results"
    save_results_view(mine, ["reward/mean"])
    assert results_page(tracked_home) in results_links(mine)
    links = results_links(mine)
    assert f"(#/experiments/{mine.experiment_id}/runs?viewStateShareKey=results)" in links
    assert f"/s?experiments=%5B%22{mine.experiment_id}%22%2C%22{tiny.experiment_id}%22%5D&" in links


def refusing(code: int) -> Callable[..., str]:
    def refuse(name: str) -> str:
        raise MlflowException(f"{name} is refused", error_code=code)

    return refuse


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (none_if_missing, RESOURCE_ALREADY_EXISTS),
        (ignore_existing, RESOURCE_DOES_NOT_EXIST),
    ],
)
def test_any_other_error_is_raised(call: Callable[..., object], code: int) -> None:
    with pytest.raises(MlflowException, match="name is refused"):
        call(refusing(code), "name")


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


def test_a_call_is_retried_with_longer_pauses(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
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


def test_the_client_waits_for_a_locked_database(tracked_home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
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
