from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from tasks.registry import find_version, register_model, set_alias
from tasks.settings import Home
from tasks.tracking import Tracker, download_model, open_tracker


@pytest.fixture
def tracker(tracked_home: Home) -> Tracker:
    return open_tracker(tracked_home)


def checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"hidden_size": 8}')
    return folder


def test_a_model_is_registered_as_files_and_found_by_its_alias(tracker: Tracker, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model")
    run = tracker.start_run("tiny/grpo", "stage", tags={})
    first = register_model(run, folder, name="tiny-grpo", tags={"sha256": "ab"})
    second = register_model(run, folder, name="tiny-grpo", tags={"sha256": "cd"})
    assert (first.version, second.version, second.sha256) == (1, 2, "cd")
    assert find_version(tracker, "tiny-grpo", "champion") is None
    assert find_version(tracker, "nothing", "champion") is None
    set_alias(tracker, second, "champion")
    assert find_version(tracker, "tiny-grpo", "champion") == second
    loaded = download_model("models:/tiny-grpo@champion", tmp_path / "loaded")
    assert (loaded / "config.json").read_text() == '{"hidden_size": 8}'
    assert not any(path.suffix == ".pkl" for path in (tmp_path / "home" / "mlartifacts").rglob("*"))


def test_a_models_figures_name_the_data_that_they_were_measured_on(tracker: Tracker, tmp_path: Path) -> None:
    path = tmp_path / "eval.parquet"
    parquet.write_table(pa.table({"prompt_id": ["a"]}), path)
    run = tracker.start_run("tiny/grpo", "stage", tags={})
    version = register_model(run, checkpoint(tmp_path / "model"), name="tiny-sft", tags={"sha256": "ab"})
    dataset = run.log_dataset(path, name="prompts", context="eval")
    run.log_model_metrics(version.model_id, {"eval/accuracy": 0.5}, dataset=dataset)
    (metric,) = tracker.client.get_logged_model(version.model_id).metrics
    assert (metric.key, metric.value, metric.dataset_digest) == ("eval/accuracy", 0.5, dataset.digest)


def test_the_figures_of_a_model_add_no_point_before_the_curve_of_its_run(tracker: Tracker, tmp_path: Path) -> None:
    run = tracker.start_run("e", "grpo", tags={})
    for step in (1, 2, 3):
        run.log_metrics({"reward/mean": step / 10}, step=step)
    run.flush()
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights").write_bytes(b"w")
    version = register_model(run, folder, name="m", tags={"sha256": "0"})
    run.log_model_metrics(version.model_id, {"reward/mean": 0.3})
    history = tracker.client.get_metric_history(run.run_id, "reward/mean")
    assert {metric.step for metric in history} == {1, 2, 3}
    run.end("FINISHED")
