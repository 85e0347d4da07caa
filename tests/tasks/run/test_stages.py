from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from rlcore.config import HardwareConfig
from rlcore.errors import ConfigError, TrainingError
from rlcore.tasks.keys.machine import known_machine
from rlcore.tasks.kinds.kind import Stage
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.sections import Sections
from rlcore.tasks.presets.settings import BudgetConfig
from rlcore.tasks.run.budget import Meter
from rlcore.tasks.run.stage_runs import PipelineRun, parameters
from rlcore.tasks.run.stages import run_stage
from rlcore.tasks.steps.base import StageContext, StageResult
from rlcore.tasks.store.artifacts import ArtifactRef, ArtifactStore
from rlcore.tasks.store.cache import StageCache
from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking.runs import open_tracker
from tests.toys import ToyConfig


@dataclass(frozen=True, kw_only=True)
class ToySection:
    value: int = 1
    unrelated: int = 1


@dataclass(frozen=True, kw_only=True)
class StageConfig(ToyConfig):
    toy: ToySection = field(default_factory=ToySection)


calls: list[str] = []  # which functions really ran


@pytest.fixture(autouse=True)
def _forget_calls() -> None:
    calls.clear()


config = StageConfig.run


def toy_section(config: RunConfig) -> Sections:
    return Sections({"value": cast(StageConfig, config).toy.value})


def make_number(context: StageContext) -> StageResult:
    calls.append("make")
    value = context.config.value
    (context.folder / "number.txt").write_text(str(value + context.seed))
    return StageResult(metrics={"value": value}, rows=1, contract="numbers/v1")


def double(context: StageContext) -> StageResult:
    calls.append("double")
    value = int((context.inputs["make"] / "number.txt").read_text())
    (context.folder / "number.txt").write_text(str(2 * value))
    context.log(f"{value} doubled")
    return StageResult(metrics={})


def fail_after_two_steps(context: StageContext) -> StageResult:
    done = context.work / "steps"
    already = len(done.read_text()) if done.exists() else 0
    for step in range(already + 1, 5):
        calls.append(f"step {step}")
        context.tracker.log_metrics({"loss": 1.0 / step}, step=step)
        done.write_text("x" * step)
        if step == 2:
            (context.folder / "half").write_text("half")
            raise TrainingError("the machine burns")
    (context.folder / "result").write_text("whole")
    return StageResult(metrics={"loss": 0.25})


MAKE = Stage(name="make", version=1, kind="number", run=make_number, sections=toy_section)
DOUBLE = Stage(name="double", version=1, kind="number", run=double, sections=toy_section, inputs=("make",))
FAIL = Stage(name="fail", version=1, kind="number", run=fail_after_two_steps, sections=toy_section)


@pytest.fixture
def run(tracked_home: Home) -> PipelineRun:
    return open_run(tracked_home)


def open_run(home: Home) -> PipelineRun:
    tracker = open_tracker(home)
    return PipelineRun(
        home=home,
        store=ArtifactStore(home.root),
        cache=StageCache(home.cache),
        tracker=tracker,
        experiment="toy",
        parent=tracker.start_run("toy", "pipeline", tags={}),
        meter=Meter(home.root / "budgets" / "toy", BudgetConfig(), 0.0),
    )


def text(run: PipelineRun, ref: ArtifactRef, name: str = "number.txt") -> str:
    return (run.store.path(ref) / name).read_text()


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


def test_the_second_time_nothing_is_computed(run: PipelineRun) -> None:
    first, second = make(run), make(run)
    assert first == second
    assert calls == ["make"]
    parent = run.tracker.client.get_run(run.parent.run_id)
    assert parent.data.tags["stage.make"] == f"cached:{first.mlflow_run_id}"


@pytest.mark.parametrize("changed", [{"seed": 1}, {"toy": ToySection(value=2)}])
def test_a_change_that_matters_computes_anew(run: PipelineRun, changed: dict[str, Any]) -> None:
    assert make(run).sha256 != make(run, **changed).sha256
    assert make(run).stage_key != make(run, **changed).stage_key
    assert calls == ["make", "make"]


@pytest.mark.parametrize("changed", [{"name": "other"}, {"toy": ToySection(unrelated=2)}])
def test_a_change_outside_of_the_section_computes_nothing(run: PipelineRun, changed: dict[str, Any]) -> None:
    assert make(run) == make(run, **changed)
    assert calls == ["make"]


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


def test_a_machine_that_is_remembered_wrongly_computes_nothing(
    run: PipelineRun, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize("damage", ["remove", "cut", "add"])
def test_a_damaged_artifact_is_computed_again(run: PipelineRun, damage: str) -> None:
    ref = make(run)
    folder = run.store.path(ref)
    {"remove": partial((folder / "number.txt").unlink), "cut": partial((folder / "number.txt").write_text, ""),
     "add": partial((folder / "more.txt").write_text, "")}[damage]()  # fmt: skip
    again = make(run)
    assert (again.sha256, text(run, again)) == (ref.sha256, "1")
    assert calls == ["make", "make"]
    assert run.store.errors(again) == ()


def test_an_input_with_the_same_bytes_is_the_same_input_whatever_made_it(run: PipelineRun) -> None:
    one = make(run)
    same = make(run, toy=ToySection(value=0), seed=1)  # 0 + 1: other key, same content
    other = make(run, toy=ToySection(value=5))
    assert one.stage_key != same.stage_key
    for ref in (one, same, other):
        run_stage(DOUBLE, config(), {"make": ref}, run)
    assert calls.count("double") == 2


def test_an_error_goes_on_unchanged_and_leaves_no_artifact_but_the_work(run: PipelineRun) -> None:
    with pytest.raises(TrainingError, match="the machine burns"):
        run_stage(FAIL, config(), {}, run)
    assert not (run.home.artifacts / "number").exists()
    assert run.cache.records("fail") == ()
    assert [path.is_dir() for path in run.home.work.iterdir()] == [True]  # no output, no lock


def test_a_resumed_stage_finds_its_work_and_goes_on_in_the_same_run(run: PipelineRun) -> None:
    with pytest.raises(TrainingError):
        run_stage(FAIL, config(), {}, run)
    ref = run_stage(FAIL, config(), {}, run)
    assert calls == ["step 1", "step 2", "step 3", "step 4"]
    assert text(run, ref, "result") == "whole"
    assert not (run.store.path(ref) / "half").exists()
    history = run.tracker.client.get_metric_history(ref.mlflow_run_id, "loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25)]
    assert run.tracker.client.get_run(ref.mlflow_run_id).info.status == "FINISHED"
    assert list(run.home.work.iterdir()) == []


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
        Stage(name="x", version=1, kind="x", run=captured(), sections=toy_section)


def test_an_edit_of_a_helper_reruns_exactly_the_stages_that_import_it(
    run: PipelineRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "code" / "toy_stages"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "helper.py").write_text("FACTOR = 1\n")
    (package / "one.py").write_text(STAGE_SOURCE + "    from toy_stages import helper  # noqa\n    return RESULT\n")
    (package / "two.py").write_text(STAGE_SOURCE + "    return RESULT\n")
    monkeypatch.syspath_prepend(str(package.parent))
    modules = [importlib.import_module(f"toy_stages.{name}") for name in ("one", "two")]
    stages = [
        Stage(name=module.__name__, version=1, kind="x", run=module.run, sections=toy_section) for module in modules
    ]

    def ran() -> list[bool]:
        before = [run.cache.records(stage.name) for stage in stages]
        for stage in stages:
            run_stage(stage, config(), {}, run)
        return [run.cache.records(stage.name) != old for stage, old in zip(stages, before, strict=True)]

    assert ran() == [True, True]
    assert ran() == [False, False]
    (package / "helper.py").write_text('"""Now with a comment."""\n\nFACTOR = 1  # one\n')
    assert ran() == [False, False]
    (package / "helper.py").write_text("FACTOR = 2\n")
    assert ran() == [True, False]


STAGE_SOURCE = """
from rlcore.tasks.presets.sections import Sections
from rlcore.tasks.steps.base import StageResult
RESULT = StageResult(metrics={})
def run(context):
    (context.folder / "x").write_text("x")
"""


def test_a_stages_own_settings_give_parameters_without_a_name_so_that_runs_can_be_compared() -> None:
    section = {"stage": {"learning_rate": 0.1}, "evaluation": {"verifier": "math"}}
    assert parameters(section) == {"learning_rate": 0.1, "evaluation": {"verifier": "math"}}
    assert parameters({"model": {"path": "x"}}) == {"model": {"path": "x"}}
