"""Registration of a stage's model: after the stage, under the run's name, whatever is cached."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from rlcore.tasks.keys.plan import deleted_lines
from rlcore.tasks.kinds.kind import Stage
from rlcore.tasks.run.pipeline import run_pipeline
from rlcore.tasks.steps.base import StageContext, StageResult
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking.registry import download_model, find_by_sha256, find_number, read_tags
from rlcore.tasks.tracking.runs import open_tracker
from tests.toys import ToyConfig, no_sections

ran: list[str] = []


@pytest.fixture(autouse=True)
def _forget() -> None:
    ran.clear()


def rows(context: StageContext) -> StageResult:
    (context.folder / "rows").write_text("few")
    return StageResult(metrics={})


def train(context: StageContext) -> StageResult:
    ran.append("train")
    (context.folder / "model").mkdir()
    (context.folder / "model" / "config.json").write_text("{}")
    (context.folder / "history.json").write_text("[]")
    return StageResult(metrics={"eval/accuracy": 0.5})


ROWS = Stage(name="rows", version=1, kind="dataset", run=rows, sections=no_sections)
SFT = Stage(
    name="sft", version=1, kind="checkpoint", run=train, sections=no_sections, inputs=("rows",), registered_as="sft"
)
GRPO = Stage(
    name="grpo", version=1, kind="policy", run=train, sections=no_sections, inputs=("sft", "rows"), registered_as="grpo"
)


def run(home: Home, name: str = "toy") -> Mapping[str, ArtifactRef]:
    config = ToyConfig.run(name=name)
    return run_pipeline([ROWS, SFT, GRPO], config, ["grpo"], home=home, experiment=name)


def test_a_model_is_registered_with_its_digests_and_figures_and_without_the_rest_of_the_artifact(
    tracked_home: Home,
) -> None:
    refs, tracker = run(tracked_home), open_tracker(tracked_home)
    version = find_number(tracker, "toy-grpo", "1")
    assert version is not None
    assert version == find_by_sha256(tracker, "toy-grpo", refs["grpo"].sha256)
    tags = read_tags(tracker, version)
    assert (tags["preset"], tags["stage_key"]) == ("toy", refs["grpo"].stage_key)
    assert tags["data"] == f"rows:{refs['rows'].sha256}"
    assert tags["parents"] == f"sft:{refs['sft'].sha256}"
    model = tracker.client.get_logged_model(version.model_id)
    assert [(metric.key, metric.value) for metric in model.metrics] == [("eval/accuracy", 0.5)]
    assert model.source_run_id == refs["grpo"].mlflow_run_id


def test_a_cached_model_is_registered_once_under_each_name_that_asks_for_it(tracked_home: Home) -> None:
    first = run(tracked_home)
    assert run(tracked_home) == first
    assert run(tracked_home, "mine") == first
    assert ran == ["train", "train"]  # SFT and GRPO, once each
    tracker = open_tracker(tracked_home)
    found = {name: tracker.client.search_model_versions(f"name = '{name}'") for name in ("toy-grpo", "mine-grpo")}
    assert {name: len(versions) for name, versions in found.items()} == {"toy-grpo": 1, "mine-grpo": 1}
    (mine,) = found["mine-grpo"]
    assert (mine.tags["preset"], mine.tags["sha256"]) == ("mine", first["grpo"].sha256)


@pytest.mark.parametrize("what", ["run", "experiment"])
def test_where_a_person_has_deleted_the_run_in_mlflow_the_present_run_publishes_the_cached_model(
    what: str, tracked_home: Home, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refs, tracker = run(tracked_home), open_tracker(tracked_home)
    ref = refs["grpo"]
    if what == "run":
        tracker.client.delete_run(ref.mlflow_run_id)
    else:
        tracker.client.delete_experiment(tracker.find_run(ref.mlflow_run_id).experiment_id)  # type: ignore[union-attr]
    (line,) = deleted_lines({"grpo": ref}, tracked_home)
    assert line == "mlflow: the run of grpo was deleted; the next run publishes its results"
    tracker.client.delete_registered_model("toy-grpo")
    ran.clear()
    with caplog.at_level("WARNING", logger="rlcore"):
        assert run(tracked_home) == refs
    assert ran == []
    said = [record.getMessage() for record in caplog.records]
    assert ["the MLflow experiment 'toy' was deleted; this run is in 'toy 2'"] * (what == "experiment") == said[:-1]
    assert said[-1].startswith("grpo: its MLflow run is not there or was deleted; this run publishes its model")
    assert download_model("models:/toy-grpo/1", tmp_path / "files").is_dir()
    assert run(tracked_home) == refs  # and again, without a word about the model
