from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlcore.errors import StorageError
from rlcore.tasks.run import stages
from rlcore.tasks.run.stage_runs import PipelineRun, StepOutput, log_cache_hit, open_stage_run
from rlcore.tasks.run.stages import run_stage
from rlcore.tasks.store.cache import StageCache
from rlcore.tasks.store.settings import Home
from tests.tasks.run.test_stages import MAKE, config, open_run


class Killed(BaseException):
    """Stands for SIGKILL: no handler of ours catches it."""


@pytest.fixture
def run(tracked_home: Home) -> PipelineRun:
    return open_run(tracked_home)


def test_a_run_without_a_result_is_found_by_its_key_when_its_note_is_missing(run: PipelineRun, tmp_path: Path) -> None:
    first = open_stage_run("make", "k1", tmp_path, run)
    (tmp_path / "mlflow_run.json").unlink()
    first.end("KILLED")  # by whoever healed what the kill has left
    assert open_stage_run("make", "k1", tmp_path, run).run_id == first.run_id
    (tmp_path / "mlflow_run.json").unlink()
    other = open_stage_run("make", "k1", tmp_path, run)
    assert other.run_id != first.run_id  # which runs now: in another home, for all that is known here
    other.end("FINISHED")
    (tmp_path / "mlflow_run.json").write_text(json.dumps({"run_id": first.run_id}))
    first.end("FINISHED")
    again = open_stage_run("make", "k1", tmp_path, run)
    assert again.run_id == first.run_id  # by its note
    again.end("FINISHED")
    (tmp_path / "mlflow_run.json").unlink()
    assert open_stage_run("make", "k1", tmp_path, run).run_id != first.run_id


@pytest.mark.parametrize("behind", ["place", "record"])
def test_a_result_that_the_store_has_is_not_made_again(
    run: PipelineRun, monkeypatch: pytest.MonkeyPatch, behind: str
) -> None:
    def die(*_: Any, **__: Any) -> None:
        raise Killed

    if behind == "place":
        monkeypatch.setattr(stages, "log_result", die)
    else:
        monkeypatch.setattr(StageCache, "write", die)
    with pytest.raises(Killed):
        run_stage(MAKE, config(), {}, run)
    monkeypatch.undo()
    (made,) = (run.home.artifacts / "number").iterdir()
    monkeypatch.setattr(stages, "_run_step", die)
    ref = run_stage(MAKE, config(), {}, run)
    assert ref.sha256 == made.name
    assert list(run.home.work.iterdir()) == []
    client = run.tracker.client
    found = client.search_runs([run.parent.experiment_id], f"tags.stage_key = '{ref.stage_key}'")
    assert [each.info.status for each in found] == ["FINISHED"]
    assert found[0].data.tags["sha256"] == ref.sha256


@pytest.mark.parametrize("damaged", ["nothing", "note", "result"])
def test_a_noted_result_is_taken_if_the_store_has_it_whole(run: PipelineRun, damaged: str) -> None:
    ref = run_stage(MAKE, config(), {}, run)
    run.cache.path("make", ref.stage_key).unlink()
    work = run.home.work / ref.stage_key
    StepOutput(ref=ref, metrics={"noted": 1.0}).note(work)
    if damaged != "nothing":
        path = work / "result.json" if damaged == "note" else run.store.path(ref) / "number.txt"
        path.write_text("{")
    assert run_stage(MAKE, config(), {}, run).sha256 == ref.sha256
    record = run.cache.find("make", ref.stage_key)
    assert record is not None
    assert ("noted" in record.metrics) == (damaged == "nothing")


def test_a_work_folder_behind_its_record_goes(run: PipelineRun) -> None:
    ref = run_stage(MAKE, config(), {}, run)
    (run.home.work / ref.stage_key).mkdir()
    assert run_stage(MAKE, config(), {}, run) == ref
    assert list(run.home.work.iterdir()) == []


def test_a_stage_that_an_attempt_at_this_run_has_made_is_not_called_cached(run: PipelineRun) -> None:
    ref = run_stage(MAKE, config(), {}, run)
    run.parent.end("KILLED")
    again = run.tracker.reopen_run(run.parent.run_id)
    assert again is not None
    for parent, words in ((again, "run"), (open_run(run.home).parent, "cached")):
        log_cache_hit("make", ref, PipelineRun(**{**vars(run), "parent": parent}))
        assert run.tracker.client.get_run(parent.run_id).data.tags.get("stage.make", "run:").partition(":")[0] == words


def test_a_half_written_file_never_becomes_part_of_a_result(run: PipelineRun, tmp_path: Path) -> None:
    folder = run.home.work / "output"
    folder.mkdir()
    (folder / "number.txt").write_text("1")
    (folder / ".number.txt.0123abcd.tmp").write_text("1")
    with pytest.raises(StorageError, match="never finished"):
        run.store.commit(folder, kind="number")
