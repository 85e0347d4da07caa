from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from mlflow.exceptions import MlflowException

from rlcore.tasks.store.settings import Home, find_home
from rlcore.tasks.tracking.runs import PARENT_TAG, RunTracker, Tracker, open_tracker
from tests.flows.conftest import environment
from tests.flows.warm import run_warm


@pytest.fixture
def tracker(tracked_home: Home) -> Tracker:
    return open_tracker(tracked_home)


def start(tracker: Tracker, name: str = "stage", parent: str = "") -> RunTracker:
    return tracker.start_run("tiny/grpo", name, tags={"stage": name}, parent=parent)


def history(tracker: Tracker, run: RunTracker, name: str) -> list[tuple[int, float]]:
    return [(metric.step, metric.value) for metric in tracker.client.get_metric_history(run.run_id, name)]


def checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"hidden_size": 8}')
    return folder


def test_metrics_parameters_and_tags_of_a_run_can_be_read_back(tracker: Tracker) -> None:
    with start(tracker) as run:
        run.log_params({"sft": {"learning_rate": 0.1}, "text": "x" * 600})
        run.set_tags({"colour": "red"})
        run.log_metrics({"loss": 2.0}, step=1)
        run.log_metrics({"loss": 1.0}, step=2)
    data = tracker.client.get_run(run.run_id).data
    assert data.params == {"sft.learning_rate": "0.1", "text": "x" * 500}
    assert data.tags["colour"] == "red"
    assert history(tracker, run, "loss") == [(1, 2.0), (2, 1.0)]
    assert tracker.client.get_run(run.run_id).info.status == "FINISHED"


def test_more_parameters_than_one_call_takes_are_all_logged(tracker: Tracker) -> None:
    run = start(tracker)
    run.log_params({"section": {f"p{i}": i for i in range(250)}})
    assert len(tracker.client.get_run(run.run_id).data.params) == 250


def test_a_reopened_run_drops_the_steps_that_it_has_already(tracker: Tracker) -> None:
    first = start(tracker)
    for step in (1, 2, 3):
        first.log_metrics({"reward": float(step)}, step=step)
    first.flush()  # the process dies here, after its checkpoint of step 1
    again = tracker.reopen_run(first.run_id)
    assert again is not None
    for step in (2, 3, 4):
        again.log_metrics({"reward": 10.0 * step, "new": 1.0}, step=step)
    again.end("FINISHED")
    assert history(tracker, again, "reward") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    assert history(tracker, again, "new") == [(2, 1.0), (3, 1.0), (4, 1.0)]


def test_a_reopened_run_runs_again_and_belongs_to_its_new_parent(tracker: Tracker) -> None:
    run = start(tracker, parent=start(tracker, "old").run_id)
    run.end("KILLED")
    parent = start(tracker, "new")
    tracker.reopen_run(run.run_id, parent=parent.run_id)
    stored = tracker.client.get_run(run.run_id)
    assert stored.info.status == "RUNNING"
    assert stored.data.tags[PARENT_TAG] == parent.run_id


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


def test_a_run_is_found_by_its_tag(tracker: Tracker) -> None:
    run = start(tracker)
    run.set_tags({"attempt_of": "abc/1"})
    assert tracker.find_runs("tiny/grpo", "attempt_of", "abc/1") == [run.run_id]
    assert tracker.find_runs("tiny/grpo", "attempt_of", "abc/1", status="= 'KILLED'") == []
    assert tracker.find_runs("tiny/grpo", "attempt_of", "abc/2") == []


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
    logged = run.log_dataset(path, name="verifiable_prompts/v1", context="train")
    (entry,) = tracker.client.get_run(run.run_id).inputs.dataset_inputs
    digest = subprocess.run(["sha256sum", str(path)], capture_output=True, text=True, check=True).stdout[:64]
    assert logged.digest == entry.dataset.digest == digest[:36]
    assert {tag.key: tag.value for tag in entry.tags} == {"mlflow.data.context": "train", "sha256": digest}
    assert entry.dataset.profile == '{"num_rows": 2}'


def test_files_and_folders_are_kept_with_the_run(tracker: Tracker, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "files")
    run = start(tracker)
    run.log_artifact(folder / "config.json", "plots")
    run.log_artifact(folder, "rollouts")
    for name in ("plots", "rollouts"):
        assert [entry.path for entry in tracker.client.list_artifacts(run.run_id, name)] == [f"{name}/config.json"]


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


def test_a_loop_does_not_wait_for_the_database_and_its_curves_are_whole(
    tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
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
