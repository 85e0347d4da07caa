from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from mlflow import MlflowClient

from rlcore.errors import ModelError
from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking.mlflow_model import Cards, Package
from rlcore.tasks.tracking.registration import register_model
from rlcore.tasks.tracking.registry import (
    ModelVersion,
    count_look,
    download_model,
    find_by_sha256,
    find_version,
    set_alias,
)
from rlcore.tasks.tracking.runs import Tracker, open_tracker
from tests.registered import register_versions, sealed


@pytest.fixture
def tracker(tracked_home: Home) -> Tracker:
    return open_tracker(tracked_home)


def checkpoint(folder: Path) -> Package:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"hidden_size": 8}')
    return Package(checkpoint=folder, cards=Cards(model="", data="", license_id=""))


def test_a_model_is_registered_as_files_and_found_by_its_alias(tracker: Tracker, tmp_path: Path) -> None:
    folder, sha256 = sealed(checkpoint(tmp_path / "artifact" / "model").checkpoint)
    run = tracker.start_run("tiny/grpo", "stage", tags={})
    first = register_model(run, folder, name="tiny-grpo", tags={"sha256": "ab"})
    second = register_model(run, folder, name="tiny-grpo", tags={"sha256": sha256})
    assert (first.version, second.version, second.sha256) == (1, 2, sha256)
    assert find_version(tracker, "tiny-grpo", "champion") is None
    assert find_version(tracker, "nothing", "champion") is None
    set_alias(tracker, second, "champion")
    assert find_version(tracker, "tiny-grpo", "champion") == second
    loaded = download_model("models:/tiny-grpo@champion", tmp_path / "loaded")
    assert (loaded / "config.json").read_text() == '{"hidden_size": 8}'
    assert not any(path.suffix == ".pkl" for path in (tmp_path / "home" / "mlartifacts").rglob("*"))


@pytest.mark.parametrize(
    "call", ["create_logged_model", "finalize_logged_model", "log_outputs", "log_batch", "create_model_version"]
)
def test_a_registration_that_was_killed_is_done_again_with_what_it_had_begun(
    tracker: Tracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    class Killed(BaseException):
        pass

    def die(*_: object, **__: object) -> None:
        raise Killed

    folder, sha256 = sealed(checkpoint(tmp_path / "artifact" / "model").checkpoint)
    run = tracker.start_run("tiny/grpo", "stage", tags={})
    with monkeypatch.context() as killed, pytest.raises(Killed):
        killed.setattr(MlflowClient, call, die)
        register_model(run, folder, name="tiny-grpo", tags={"sha256": sha256}, metrics={"loss": 0.5})
    version = register_model(run, folder, name="tiny-grpo", tags={"sha256": sha256}, metrics={"loss": 0.5})
    assert version.version == 1
    (model,) = tracker.client.search_logged_models([run.experiment_id])
    assert (model.model_id, str(model.status)) == (version.model_id, "READY")
    assert [metric.value for metric in model.metrics or []] == [0.5]
    assert len(tracker.client.get_run(run.run_id).outputs.model_outputs) == 1
    assert len(tracker.client.get_metric_history(run.run_id, "loss")) == 1
    loaded = download_model("models:/tiny-grpo/1", tmp_path / "loaded")
    assert (loaded / "config.json").read_text() == '{"hidden_size": 8}'


def test_a_model_that_is_not_registered_is_refused(tracker: Tracker, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="models:/nothing/1"):
        download_model("models:/nothing/1", tmp_path)


def test_a_models_figures_name_the_data_that_they_were_measured_on(tracker: Tracker, tmp_path: Path) -> None:
    path = tmp_path / "eval.parquet"
    parquet.write_table(pa.table({"prompt_id": ["a"]}), path)
    run = tracker.start_run("tiny/grpo", "stage", tags={})
    version = register_model(run, checkpoint(tmp_path / "model"), name="tiny-sft", tags={"sha256": "ab"})
    dataset = run.log_dataset(path, name="prompts", context="eval")
    run.log_model_metrics(version.model_id, {"eval/accuracy": 0.5}, dataset=dataset)
    (metric,) = tracker.client.get_logged_model(version.model_id).metrics
    assert (metric.key, metric.value, metric.dataset_digest) == ("eval/accuracy", 0.5, dataset.digest)


@pytest.fixture
def versions(tracker: Tracker, tmp_path: Path) -> list[ModelVersion]:
    return register_versions(tracker, tmp_path / "model", "m")


def test_every_new_pair_on_the_same_data_is_a_look_and_a_repeated_one_is_not(
    tracked_home: Home, tracker: Tracker, versions: list[ModelVersion]
) -> None:
    def look(data: str, pair: str, name: str = "m") -> int:
        return count_look(tracked_home, tracker, name, data=data, pair=pair)

    assert [look("d1", "b-a"), look("d1", "c-a"), look("d1", "b-a"), look("d2", "b-a")] == [1, 2, 1, 1]
    assert look("d1", "c-b") == 3
    tracker.client.create_registered_model("other")
    assert [look("d1", "e-d", "other"), look("d1", "e-d", "other"), look("d1", "f-a")] == [4, 4, 5]
    assert look("d1", "b-a", "other") == 1  # the very comparison, under another name


def test_a_version_is_found_by_the_digest_of_its_artifact(tracker: Tracker, versions: list[ModelVersion]) -> None:
    assert find_by_sha256(tracker, "m", versions[1].sha256) == versions[1]
    assert find_by_sha256(tracker, "m", "0" * 64) is None
    assert find_by_sha256(tracker, "other", versions[1].sha256) is None
