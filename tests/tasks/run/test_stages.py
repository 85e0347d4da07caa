"""One stage: its key and artifact, another attempt after a failure or a kill, its run in MLflow, and its curves."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlcore.config import HardwareConfig
from rlcore.errors import ConfigError, TrainingError
from rlcore.tasks.keys.machine import known_machine
from rlcore.tasks.kinds.kind import Stage
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.sections import Sections
from rlcore.tasks.presets.settings import TrackingConfig
from rlcore.tasks.run import stages
from rlcore.tasks.run.stages import PipelineRun, StepOutput, log_cache_hit, open_stage_run, parameters, run_stage
from rlcore.tasks.steps.base import StageContext, StageResult
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.cache import StageCache
from rlcore.tasks.store.settings import Home
from tests.tasks.run.toy_stages import DOUBLE, FAIL, MAKE, calls, config, open_run, text, toy_section
from tests.toys import ToyConfig


def make(run: PipelineRun, **changed: Any) -> ArtifactRef:
    return run_stage(MAKE, config(**changed), {}, run)


def test_a_stage_gives_its_files_with_their_provenance(run: PipelineRun) -> None:
    ref = make(run)
    assert text(run, ref) == "1"
    assert (ref.kind, ref.rows, ref.contract, len(ref.stage_key)) == ("number", 1, "numbers/v1", 64)
    child = run.tracker.client.get_run(ref.mlflow_run_id)
    assert child.info.status == "FINISHED"
    assert child.data.metrics == {"value": 1.0}
    assert child.data.params == {"value": "1", "seed": "0"}
    assert (child.data.tags["sha256"], child.data.tags["stage_key"]) == (ref.sha256, ref.stage_key)
    assert list(run.home.work.iterdir()) == []


def test_version_outside_data_and_bound_arguments_belong_to_the_key(run: PipelineRun) -> None:
    def keys(stage: Stage) -> str:
        return run_stage(stage, config(), {}, run).stage_key

    variants = [
        MAKE,
        replace(MAKE, version=2),
        replace(MAKE, source_digest=lambda config: "digest of a file"),
        replace(MAKE, run=partial(with_argument, factor=1)),
        replace(MAKE, run=partial(with_argument, factor=2)),
    ]
    assert len({keys(stage) for stage in variants}) == len(variants)


def toy_and_hardware(config: RunConfig) -> Sections:
    return Sections({**toy_section(config).declared, "hardware": config.hardware})


def test_a_stage_that_computes_has_the_machine_in_its_key_and_its_run_and_another_has_not(run: PipelineRun) -> None:
    computing = replace(MAKE, sections=toy_and_hardware)
    threads = torch.get_num_threads()
    asked = [
        HardwareConfig(device="cpu"),
        HardwareConfig(device="cpu", dtype="float32", num_threads=threads),  # what the first becomes
        HardwareConfig(device="cpu", dtype="bfloat16"),
        HardwareConfig(device="cpu", num_threads=threads + 1),
        HardwareConfig(device="cpu", gradient_checkpointing=True),
    ]
    refs = [run_stage(computing, config(hardware=each), {}, run) for each in asked]
    assert [refs.index(ref) for ref in refs] == [0, 0, 2, 3, 4]
    params = run.tracker.client.get_run(refs[2].mlflow_run_id).data.params
    assert (params["machine.device"], params["machine.precision"]) == ("cpu", "bfloat16")
    assert params["hardware.gradient_checkpointing"] == "False"
    assert make(run, hardware=asked[0]) == make(run, hardware=asked[2])


def test_a_wrongly_remembered_machine_runs_nothing(run: PipelineRun, monkeypatch: pytest.MonkeyPatch) -> None:
    computing, whole = replace(MAKE, sections=toy_and_hardware), config(hardware=HardwareConfig(device="cpu"))
    real = known_machine(whole.hardware)
    found = iter([replace(real, facts={**real.facts, "instructions": "of another processor"})])
    monkeypatch.setattr("rlcore.tasks.keys.key_inputs.known_machine", lambda _: next(found, real))
    ref = run_stage(computing, whole, {}, run)
    record = run.cache.find("make", ref.stage_key)
    assert record is not None
    assert (record.ingredients["machine"], calls) == (real.facts, ["make"])
    assert run_stage(computing, whole, {}, run) == ref


def with_argument(context: StageContext, *, factor: int) -> StageResult:
    (context.folder / "number.txt").write_text(str(factor))
    return StageResult(metrics={})


def test_an_error_goes_on_unchanged_and_leaves_no_artifact_but_the_work(run: PipelineRun) -> None:
    with pytest.raises(TrainingError, match="the machine burns"):
        run_stage(FAIL, config(), {}, run)
    assert not (run.home.artifacts / "number").exists()
    assert run.cache.records("fail") == ()
    assert [path.is_dir() for path in run.home.work.iterdir()] == [True]  # no output, no lock


def read_undeclared(context: StageContext) -> StageResult:
    return StageResult(metrics={"x": float(context.config.unrelated)})


def test_a_step_that_reads_what_its_stage_did_not_declare_fails(run: PipelineRun) -> None:
    with pytest.raises(AttributeError, match="has not declared the section 'unrelated'"):
        run_stage(replace(MAKE, run=read_undeclared), config(), {}, run)
    assert run.cache.records("make") == ()


def test_two_at_once_compute_once(run: PipelineRun) -> None:
    refs: list[ArtifactRef] = []
    threads = [threading.Thread(target=lambda: refs.append(make(run))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == ["make"]
    assert len(refs) == 4
    assert len(set(refs)) == 1


def test_one_line_per_stage_with_its_seconds(run: PipelineRun, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="rlcore")
    ref = make(run)
    make(run)
    run_stage(DOUBLE, config(), {"make": ref}, run)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "make: start"
    assert lines[1].startswith("make: done seconds=")
    assert lines[2].startswith("make: cached seconds=")
    assert lines[4] == "double: 1 doubled"


def captured() -> Callable[[StageContext], StageResult]:
    hidden = 3

    def function(context: StageContext) -> StageResult:
        return StageResult(metrics={"hidden": hidden})

    return function


def test_a_function_that_captures_variables_is_refused_because_its_key_cannot_see_them() -> None:
    with pytest.raises(ConfigError, match="captures variables"):
        Stage(name="x", artifact="x", run=captured(), sections=toy_section)


def test_a_stages_own_settings_give_parameters_without_a_name_so_that_runs_can_be_compared() -> None:
    section = {"stage": {"learning_rate": 0.1}, "evaluation": {"verifier": "math"}}
    assert parameters(section) == {"learning_rate": 0.1, "evaluation": {"verifier": "math"}}
    assert parameters({"model": {"path": "x"}}) == {"model": {"path": "x"}}


class Killed(BaseException):
    """Stands for SIGKILL: no handler of ours catches it."""


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
def test_a_stored_result_is_not_made_again(run: PipelineRun, monkeypatch: pytest.MonkeyPatch, behind: str) -> None:
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


def test_a_failed_stage_goes_on_in_the_same_curve_with_each_step_once(tracked_home: Home) -> None:
    config = replace(ToyConfig.run(), tracking=TrackingConfig(also=("tensorboard",)))
    run = open_run(tracked_home)
    with pytest.raises(TrainingError):
        run_stage(FAIL, config, {}, run)
    ref = run_stage(FAIL, config, {}, run)
    assert run_stage(FAIL, replace(config, tracking=TrackingConfig()), {}, run) == ref  # cached
    assert calls == ["step 1", "step 2", "step 3", "step 2", "step 3", "step 4", "step 5"]
    assert text(run, ref, "result") == "whole"
    assert not (run.store.path(ref) / "half").exists()
    history = run.tracker.client.get_metric_history(ref.mlflow_run_id, "loss")
    steps = [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25), (5, 0.2)]
    assert [(metric.step, metric.value) for metric in history] == steps
    assert run.tracker.client.get_run(ref.mlflow_run_id).info.status == "FINISHED"
    assert list(run.home.work.iterdir()) == []
    (folder,) = (tracked_home.root / "tensorboard" / config.name).iterdir()
    curves = EventAccumulator(str(folder)).Reload()
    assert [(event.step, round(event.value, 6)) for event in curves.Scalars("loss")] == [
        (step, round(value, 6)) for step, value in steps
    ]
    assert [(event.step, event.value) for event in curves.Scalars("memory")] == [(5, 3.0)]
