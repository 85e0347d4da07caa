from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from rlcore.config import HardwareConfig
from rlcore.errors import ConfigError
from rlcore.tasks.keys.plan import PlanRow, format_plan, look_up, order_stages
from rlcore.tasks.kinds.kind import Stage
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.sections import Sections, sections_of
from rlcore.tasks.run.leases import LEASE_TAG, hold_lease
from rlcore.tasks.run.pipeline import open_pipeline_run, run_pipeline
from rlcore.tasks.run.prefect_bridge import FlowRun
from rlcore.tasks.steps.base import StageContext, StageResult
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking.runs import PARENT_TAG, open_tracker
from tests.toys import ToyConfig


@dataclass(frozen=True, kw_only=True)
class Step:
    value: int = 1


@dataclass(frozen=True, kw_only=True)
class StepsConfig(ToyConfig):
    data: Step = field(default_factory=Step)
    sft: Step = field(default_factory=Step)
    rl: Step = field(default_factory=Step)


ran: list[str] = []


@pytest.fixture(autouse=True)
def _forget() -> None:
    ran.clear()


config = StepsConfig.run


def data_section(config: RunConfig) -> Sections:
    return sections_of(config, "data")


def sft_section(config: RunConfig) -> Sections:
    return sections_of(config, "sft")


def rl_section(config: RunConfig) -> Sections:
    return sections_of(config, "rl")


def make_data(context: StageContext) -> StageResult:
    """A threshold: values 1 and 2 give the same bytes, so that a rerun may or may not change what comes after."""
    ran.append("data")
    value = context.config.data.value
    (context.folder / "rows").write_text("few" if value < 3 else "many")
    return StageResult(metrics={"data/accepted": value}, rows=value)


def train(context: StageContext) -> StageResult:
    ran.append("sft")
    rows = (context.inputs["data"] / "rows").read_text()
    (context.folder / "model").write_text(f"{rows} {context.config.sft.value}")
    return StageResult(metrics={"sft/loss": 0.5})


def reinforce(context: StageContext) -> StageResult:
    ran.append("rl")
    if context.config.rl.value < 0:
        raise ValueError("negative")
    (context.folder / "model").write_text((context.inputs["sft"] / "model").read_text() + " rl")
    return StageResult(metrics={"reward/mean": 1.0})


def look(context: StageContext) -> StageResult:
    ran.append("other")
    (context.folder / "x").write_text("x")
    return StageResult(metrics={})


DATA = Stage(name="data", version=1, kind="dataset", run=make_data, sections=data_section)
SFT = Stage(name="sft", version=1, kind="checkpoint", run=train, sections=sft_section, inputs=("data",))
RL = Stage(name="rl", version=1, kind="policy", run=reinforce, sections=rl_section, inputs=("sft", "data"))
OTHER = Stage(name="other", version=1, kind="x", run=look, sections=rl_section)
STAGES = (RL, OTHER, SFT, DATA)


def run(home: Home, *targets: str, **changed: Any) -> Mapping[str, ArtifactRef]:
    return run_pipeline(STAGES, config(**changed), targets or ("rl",), home=home, experiment="toy")


def states(home: Home, **changed: Any) -> dict[str, tuple[str, str]]:
    return {row.stage: (row.state, row.reason) for row in look_up(STAGES, config(**changed), ["rl"], home=home)[0]}


def test_stages_are_ordered_by_what_they_need_and_the_rest_is_left_out() -> None:
    assert [stage.name for stage in order_stages(STAGES, ["rl"])] == ["data", "sft", "rl"]
    assert [stage.name for stage in order_stages(STAGES, ["data", "other"])] == ["other", "data"]


def test_wrong_graphs_are_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="unknown stage 'nothing'"):
        order_stages(STAGES, ["nothing"])
    with pytest.raises(ConfigError, match="depend on each other"):
        order_stages([replace(DATA, inputs=("rl",)), SFT, RL], ["rl"])
    with pytest.raises(ConfigError, match="same name"):
        order_stages([DATA, DATA], ["data"])


def test_a_first_run_computes_everything_a_second_nothing_and_a_plan_writes_nothing(tracked_home: Home) -> None:
    assert set(states(tracked_home).values()) == {("run", "first run of this preset")}
    first = run(tracked_home)
    assert ran == ["data", "sft", "rl"]
    before = sorted(tracked_home.root.rglob("*"))
    assert states(tracked_home) == dict.fromkeys(("data", "sft", "rl"), ("cached", ""))
    states(tracked_home, seed=1)
    assert sorted(tracked_home.root.rglob("*")) == before
    assert run(tracked_home) == first
    assert ran == ["data", "sft", "rl"]
    run(tracked_home, sft=Step(value=2))
    ran.clear()
    assert run(tracked_home) == first  # the results of another preset have not taken their place
    assert ran == []


def test_a_run_says_first_what_it_computes_with(tracked_home: Home, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="rlcore")
    hardware = HardwareConfig(device="cpu", dtype="bfloat16", num_threads=1)
    refs = run(tracked_home, "data", hardware=hardware)
    assert caplog.records[0].getMessage().startswith("machine: device=cpu precision=bfloat16 instructions=")
    tracker = open_tracker(tracked_home)
    parent = tracker.client.get_run(refs["data"].mlflow_run_id).data.tags[PARENT_TAG]
    tag = tracker.client.get_run(parent).data.tags["machine"]
    assert caplog.records[0].getMessage() == f"machine: {tag}"


def test_a_run_warns_of_a_precision_that_its_processor_computes_slowly(
    tracked_home: Home, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cpu._is_amx_fp16_supported", lambda: False)
    hardware = HardwareConfig(device="cpu", dtype="float16", num_threads=1)
    run(tracked_home, "data", hardware=hardware)
    assert [r.levelname for r in caplog.records if "no instructions for float16" in r.getMessage()] == ["WARNING"]


@pytest.mark.parametrize(
    ("changed", "expected", "reruns"),
    [
        ({"rl": Step(value=2)},
         {"data": ("cached", ""), "sft": ("cached", ""), "rl": ("run", "rl.value changed (1 -> 2)")},
         ["rl"]),
        ({"sft": Step(value=2)},
         {"data": ("cached", ""), "sft": ("run", "sft.value changed (1 -> 2)"),
          "rl": ("depends", "on the result of sft")},
         ["sft", "rl"]),
        # The data stage runs again but gives the same bytes: the cascade stops there.
        ({"data": Step(value=2)},
         {"data": ("run", "data.value changed (1 -> 2)"), "sft": ("depends", "on the result of data"),
          "rl": ("depends", "on the result of sft, data")},
         ["data"]),
        ({"data": Step(value=3)},
         {"data": ("run", "data.value changed (1 -> 3)"), "sft": ("depends", "on the result of data"),
          "rl": ("depends", "on the result of sft, data")},
         ["data", "sft", "rl"]),
        ({"data": Step(value=2), "rl": Step(value=2)},
         {"data": ("run", "data.value changed (1 -> 2)"), "sft": ("depends", "on the result of data"),
          "rl": ("run", "rl.value changed (1 -> 2)")},
         ["data", "rl"]),
        ({"seed": 1},
         {"data": ("run", "seed changed"), "sft": ("run", "seed changed"), "rl": ("run", "seed changed")},
         ["data", "sft", "rl"]),
    ],
)  # fmt: skip
def test_the_plan_says_what_then_happens(
    tracked_home: Home, changed: dict[str, Any], expected: dict[str, tuple[str, str]], reruns: list[str]
) -> None:
    run(tracked_home)
    assert states(tracked_home, **changed) == expected
    ran.clear()
    run(tracked_home, **changed)
    assert ran == reruns


def test_a_cached_stage_is_the_current_work_while_it_is_looked_up(
    tracked_home: Home, caplog: pytest.LogCaptureFixture
) -> None:
    run(tracked_home)
    caplog.set_level(logging.DEBUG, "rlcore.progress")
    caplog.clear()
    run(tracked_home)
    shown = [each.__dict__["progress"] for each in caplog.records if each.name == "rlcore.progress"]
    assert [each.label for each in shown if each.scope == "stage"] == ["data", "", "sft", "", "rl", ""]


def test_a_new_preset_is_explained_by_its_own_runs_and_shares_the_results_of_others(tracked_home: Home) -> None:
    run(tracked_home)
    changed = {"name": "copy", "sft": Step(value=2)}
    first = {
        "data": ("cached", ""),
        "sft": ("run", "first run of this preset"),
        "rl": ("depends", "on the result of sft"),
    }
    assert states(tracked_home, **changed) == first
    assert states(tracked_home, **changed, rl=Step(value=3))["rl"] == ("run", "first run of this preset")
    run(tracked_home, "data", name="copy")
    assert ran == ["data", "sft", "rl"]
    assert states(tracked_home, **changed)["sft"] == ("run", "first run of this stage")
    run(tracked_home, **changed)
    found = states(tracked_home, name="copy", data=Step(value=2), sft=Step(value=3))
    assert found["data"] == ("run", "data.value changed (1 -> 2)")  # of a result that the other preset made
    assert found["sft"] == ("run", "sft.value changed (2 -> 3)")


def test_a_damaged_artifact_is_planned_and_repaired_without_a_cascade(tracked_home: Home) -> None:
    refs = run(tracked_home)
    (tracked_home.root / refs["sft"].uri / "model").write_text("broken")
    assert states(tracked_home)["sft"] == ("run", "artifact missing or damaged: model is damaged")
    assert states(tracked_home)["rl"] == ("depends", "on the result of sft")
    ran.clear()
    assert run(tracked_home)["rl"] == refs["rl"]
    assert ran == ["sft"]


def test_a_failure_keeps_the_results_of_the_stages_before(tracked_home: Home) -> None:
    with pytest.raises(ValueError, match="negative"):
        run(tracked_home, rl=Step(value=-1))
    assert ran == ["data", "sft", "rl"]
    ran.clear()
    run(tracked_home)
    assert ran == ["rl"]
    assert list(tracked_home.leases.iterdir()) == []


def test_the_pipeline_is_one_run_with_its_computed_stages_below(tracked_home: Home) -> None:
    refs = run(tracked_home, "sft")
    run(tracked_home, "rl")
    client = open_tracker(tracked_home).client
    experiment = client.get_experiment_by_name("toy")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    parents = [each for each in runs if PARENT_TAG not in each.data.tags]  # newest first
    below = [
        sorted(each.info.run_name for each in runs if each.data.tags.get(PARENT_TAG) == parent.info.run_id)
        for parent in parents
    ]
    assert below == [["toy rl"], ["toy data", "toy sft"]]
    assert {each.info.run_name for each in parents} == {"toy"}
    assert parents[0].data.tags["stage.sft"] == f"cached:{refs['sft'].mlflow_run_id}"
    assert parents[0].data.params["sft.value"] == "1"
    assert {each.info.status for each in runs} == {"FINISHED"}


def test_a_pipeline_heals_what_a_dead_one_has_left(tracked_home: Home, caplog: pytest.LogCaptureFixture) -> None:
    with hold_lease(tracked_home, experiment="toy") as name:
        dead = open_tracker(tracked_home).start_run("toy", "dead", tags={LEASE_TAG: "dead"})
        assert name != "dead"
        (path,) = tracked_home.leases.iterdir()
        shutil.copyfile(path, tracked_home.leases / "dead.json")  # the same lease, held by nobody
    run(tracked_home)
    assert open_tracker(tracked_home).client.get_run(dead.run_id).info.status == "KILLED"
    assert f"MLflow run {dead.run_id} marked KILLED" in caplog.text


def test_a_later_attempt_of_a_flow_run_goes_on_with_its_run_unless_the_preset_changed(tracked_home: Home) -> None:
    tracker = open_tracker(tracked_home)

    def attempt(number: int, flow_run_id: str = "f1", **changed: Any) -> str:
        flow_run = FlowRun(flow_run_id=flow_run_id, name="lucky-toad", attempt=number, url="")
        values = config(**changed)
        return open_pipeline_run(tracker, "toy", values, ["rl"], lease=f"{number}", flow_run=flow_run).run_id

    first = attempt(1)
    assert attempt(2) == first
    assert attempt(2, flow_run_id="f2") != first
    assert attempt(2, seed=1) != first
    assert tracker.client.get_run(first).data.tags["prefect.flow_run_id"] == "f1"


def test_a_plan_is_printed_as_one_line_per_stage() -> None:
    rows = [
        PlanRow(stage="data", state="cached", reason=""),
        PlanRow(stage="grpo", state="run", reason="code changed: rlcore.types"),
    ]
    assert format_plan(rows) == "data  cached\ngrpo  run      code changed: rlcore.types"


def test_a_record_keeps_why_it_was_made(tracked_home: Home) -> None:
    ref = run(tracked_home)["sft"]
    document = json.loads((tracked_home.cache / "sft" / f"{ref.stage_key}.json").read_text())
    assert document["ingredients"]["config"] == {"sft": {"value": 1}}
    assert document["ref"]["sha256"] == ref.sha256
    assert document["seconds"] > 0
