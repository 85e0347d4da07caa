"""A pipeline: its plan, what runs again after a change, its runs in MLflow, and the pages of its stages."""

from __future__ import annotations

import importlib
import logging
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlcore.config import HardwareConfig
from rlcore.errors import ConfigError, DataError
from rlcore.tasks.drawing.result import Result
from rlcore.tasks.keys.plan import look_up, order_stages
from rlcore.tasks.kinds.kind import Stage
from rlcore.tasks.run.leases import LEASE_TAG, hold_lease
from rlcore.tasks.run.pages import page_folder
from rlcore.tasks.run.pipeline import is_unfinished, open_pipeline, open_pipeline_run, run_pipeline
from rlcore.tasks.run.prefect_bridge import FlowRun
from rlcore.tasks.run.retrain import recipe_of
from rlcore.tasks.steps.base import StageContext, StageResult
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import write_json
from rlcore.tasks.tracking.lineage import Ancestor, nearest
from rlcore.tasks.tracking.runs import PARENT_TAG, RunTracker, Tracker, open_tracker
from tests.tasks.homes import copy_home, new_home
from tests.tasks.run.toy_stages import DATA, RL, SFT, Section, calls, config, rl_section
from tests.toys import ToyConfig, no_sections


def look(context: StageContext) -> StageResult:
    calls.append("other")
    (context.folder / "x").write_text("x")
    return StageResult(metrics={})


OTHER = Stage(name="other", artifact="x", run=look, sections=rl_section)
STAGES = (RL, OTHER, SFT, DATA)


def run_toy(home: Home, *targets: str, **changed: Any) -> Mapping[str, ArtifactRef]:
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
    first = run_toy(tracked_home)
    assert calls == ["data", "sft", "rl"]
    before = sorted(tracked_home.root.rglob("*"))
    assert states(tracked_home) == dict.fromkeys(("data", "sft", "rl"), ("cached", ""))
    states(tracked_home, seed=1)
    assert sorted(tracked_home.root.rglob("*")) == before
    assert run_toy(tracked_home) == first
    assert calls == ["data", "sft", "rl"]
    run_toy(tracked_home, sft=Section(value=2))
    calls.clear()
    assert run_toy(tracked_home) == first  # the results of another preset have not taken their place
    assert calls == []


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, _empty_mlflow_database: Path) -> Home:
    """A home in which the pipeline has run."""
    with new_home(tmp_path_factory.mktemp("ran"), _empty_mlflow_database) as home:
        run_toy(home)
    return home


def test_a_run_begins_with_its_machine_and_warns_of_a_precision_that_the_processor_computes_slowly(
    tracked_home: Home, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cpu._is_amx_fp16_supported", lambda: False)
    caplog.set_level(logging.INFO, logger="rlcore")
    refs = run_toy(tracked_home, "data", hardware=HardwareConfig(device="cpu", dtype="float16", num_threads=1))
    tracker = open_tracker(tracked_home)
    parent = tracker.client.get_run(refs["data"].mlflow_run_id).data.tags[PARENT_TAG]
    machine = tracker.client.get_run(parent).data.tags["machine"]
    assert machine.startswith("device=cpu precision=float16 instructions=")
    assert caplog.records[0].getMessage() == f"machine: {machine}"
    assert [r.levelname for r in caplog.records if "no instructions for float16" in r.getMessage()] == ["WARNING"]


@pytest.mark.parametrize(
    ("changed", "expected", "reruns"),
    [
        ({"rl": Section(value=2)},
         {"data": ("cached", ""), "sft": ("cached", ""), "rl": ("run", "rl.value changed (1 -> 2)")},
         ["rl"]),
        ({"sft": Section(value=2)},
         {"data": ("cached", ""), "sft": ("run", "sft.value changed (1 -> 2)"),
          "rl": ("depends", "on the result of sft")},
         ["sft", "rl"]),
        # The data stage runs again but gives the same bytes: the cascade stops there.
        ({"data": Section(value=2)},
         {"data": ("run", "data.value changed (1 -> 2)"), "sft": ("depends", "on the result of data"),
          "rl": ("depends", "on the result of sft, data")},
         ["data"]),
        ({"data": Section(value=3)},
         {"data": ("run", "data.value changed (1 -> 3)"), "sft": ("depends", "on the result of data"),
          "rl": ("depends", "on the result of sft, data")},
         ["data", "sft", "rl"]),
        ({"data": Section(value=2), "rl": Section(value=2)},
         {"data": ("run", "data.value changed (1 -> 2)"), "sft": ("depends", "on the result of data"),
          "rl": ("run", "rl.value changed (1 -> 2)")},
         ["data", "rl"]),
        ({"seed": 1},
         {"data": ("run", "seed changed"), "sft": ("run", "seed changed"), "rl": ("run", "seed changed")},
         ["data", "sft", "rl"]),
    ],
)  # fmt: skip
def test_the_plan_says_what_then_happens(
    ran: Home, home: Home, changed: dict[str, Any], expected: dict[str, tuple[str, str]], reruns: list[str]
) -> None:
    copy_home(ran, home)
    assert states(home, **changed) == expected
    run_toy(home, **changed)
    assert calls == reruns


def test_a_new_preset_is_explained_by_its_own_runs_and_shares_the_results_of_others(tracked_home: Home) -> None:
    run_toy(tracked_home)
    changed = {"name": "copy", "sft": Section(value=2)}
    first = {
        "data": ("cached", ""),
        "sft": ("run", "first run of this preset"),
        "rl": ("depends", "on the result of sft"),
    }
    assert states(tracked_home, **changed) == first
    assert states(tracked_home, **changed, rl=Section(value=3))["rl"] == ("run", "first run of this preset")
    run_toy(tracked_home, "data", name="copy")
    assert calls == ["data", "sft", "rl"]
    assert states(tracked_home, **changed)["sft"] == ("run", "first run of this stage")
    run_toy(tracked_home, **changed)
    found = states(tracked_home, name="copy", data=Section(value=2), sft=Section(value=3))
    assert found["data"] == ("run", "data.value changed (1 -> 2)")  # of a result that the other preset made
    assert found["sft"] == ("run", "sft.value changed (2 -> 3)")


def test_a_damaged_artifact_is_planned_and_repaired_without_a_cascade(tracked_home: Home) -> None:
    refs = run_toy(tracked_home)
    (tracked_home.root / refs["sft"].uri / "model").write_text("broken")
    assert states(tracked_home)["sft"] == ("run", "artifact missing or damaged: model is damaged")
    assert states(tracked_home)["rl"] == ("depends", "on the result of sft")
    calls.clear()
    assert run_toy(tracked_home)["rl"] == refs["rl"]
    assert calls == ["sft"]


def test_a_failure_keeps_the_results_of_the_stages_before(tracked_home: Home) -> None:
    with pytest.raises(ValueError, match="negative"):
        run_toy(tracked_home, rl=Section(value=-1))
    assert calls == ["data", "sft", "rl"]
    calls.clear()
    run_toy(tracked_home)
    assert calls == ["rl"]
    assert list(tracked_home.leases.iterdir()) == []


def test_the_pipeline_is_one_run_with_its_computed_stages_below(tracked_home: Home) -> None:
    refs = run_toy(tracked_home, "sft")
    run_toy(tracked_home, "rl")
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
    run_toy(tracked_home)
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


@pytest.fixture
def tracker(tracked_home: Home) -> Tracker:
    return open_tracker(tracked_home)


def open_one(tracker: Tracker, *targets: str, **changed: Any) -> RunTracker:
    return open_pipeline_run(tracker, "toy", config(**changed), targets, lease="now")


def test_after_a_kill_the_same_values_and_targets_go_on_with_the_same_run_and_no_others(tracker: Tracker) -> None:
    first = open_one(tracker, "rl")
    first.end("KILLED")
    assert open_one(tracker, "sft").run_id != first.run_id
    assert open_one(tracker, "rl", seed=1).run_id != first.run_id
    again = open_one(tracker, "rl")
    assert (again.run_id, again.began) == (first.run_id, first.began)
    stored = tracker.client.get_run(first.run_id)
    assert stored.info.status == "RUNNING"
    assert stored.data.tags["restarts"] == "1"
    assert stored.data.tags[LEASE_TAG] == "now"
    for ended_by_itself in ("FINISHED", "FAILED"):
        other = open_one(tracker, "rl")
        assert other.run_id != again.run_id  # that one is alive, or ended by itself
        again = other
        again.end(ended_by_itself)
    assert open_one(tracker, "rl").run_id != again.run_id


def test_a_pipeline_whose_last_attempt_failed_at_publication_is_unfinished(tracked_home: Home) -> None:
    def publish(*_: object, **__: object) -> None:
        raise ValueError("no page")

    tracker = open_tracker(tracked_home)
    with pytest.raises(ValueError, match="no page"):
        run_pipeline(STAGES, config(), ["rl"], home=tracked_home, experiment="toy", report=publish)
    assert is_unfinished(tracked_home, tracker, "toy", config(), ["rl"])
    run_toy(tracked_home)
    assert not is_unfinished(tracked_home, tracker, "toy", config(), ["rl"])


def test_the_lease_is_there_before_the_run_and_gone_after_it(tracked_home: Home, tracker: Tracker) -> None:
    with open_pipeline(tracked_home, tracker, "toy", config(), ["rl"]) as parent:
        (lease,) = tracked_home.leases.glob("*.json")
        assert tracker.client.get_run(parent.run_id).data.tags[LEASE_TAG] == lease.stem
    assert list(tracked_home.leases.iterdir()) == []
    assert tracker.client.get_run(parent.run_id).info.status == "FINISHED"


def measure(context: StageContext) -> StageResult:
    calls.append("measure")
    (context.folder / "gate.json").write_text("7")
    return StageResult(metrics={})


def refuse(context: StageContext) -> StageResult:
    measure(context)
    raise DataError("too much", where=str(context.work / "page.md"))


def fail(context: StageContext) -> StageResult:
    raise DataError("no data")


def draw(result: Result, folder: Path) -> str:
    calls.append("draw")
    text = f"{result.preset}: {(result.data / 'gate.json').read_text()}"
    (folder / "page.md").write_text(text)
    return text


GATE = Stage(name="gate", artifact="report", run=measure, sections=no_sections, render_page=draw)


def run_gate(home: Home, stage: Stage, name: str = "toy") -> str:
    config = ToyConfig.run(name=name)
    ref = run_pipeline([stage], config, ["gate"], home=home, experiment=name)["gate"]
    return (page_folder(home, name, "gate", ref) / "page.md").read_text()


def test_a_page_is_drawn_once_for_each_name_and_the_stage_runs_once(tracked_home: Home) -> None:
    assert [run_gate(tracked_home, GATE), run_gate(tracked_home, GATE), run_gate(tracked_home, GATE, "mine")] == [
        "toy: 7", "toy: 7", "mine: 7",
    ]  # fmt: skip
    assert calls == ["measure", "draw", "draw"]


def source(context: StageContext, *, words: str) -> StageResult:
    (context.folder / "words.txt").write_text(words)
    return StageResult(metrics={})


def tell(result: Result, folder: Path) -> str:
    (folder / "page.md").write_text((result.inputs["source"] / "words.txt").read_text())
    return ""


def test_a_page_of_inputs_is_drawn_again_when_they_change(tracked_home: Home) -> None:
    teller = replace(GATE, inputs=("source",), render_page=tell)
    for words in ("one", "other", "one"):
        stages = [replace(GATE, name="source", run=partial(source, words=words), render_page=None), teller]
        ref = run_pipeline(stages, ToyConfig.run(name="toy"), ["gate"], home=tracked_home, experiment="toy")["gate"]
        assert (page_folder(tracked_home, "toy", "gate", ref) / "page.md").read_text() == words


def test_a_gate_that_refuses_has_its_page_where_the_error_says(tracked_home: Home) -> None:
    with pytest.raises(DataError, match="too much") as caught:
        run_gate(tracked_home, replace(GATE, run=refuse))
    assert Path(caught.value.where).read_text() == "toy: 7"


def test_a_stage_that_fails_without_an_account_has_no_page(tracked_home: Home) -> None:
    with pytest.raises(DataError, match="no data"):
        run_gate(tracked_home, replace(GATE, run=fail))
    assert calls == []


def test_changed_drawing_code_runs_no_stage(
    tracked_home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "rlcore_drawing_of_a_test.py"
    monkeypatch.syspath_prepend(tmp_path)

    def drawing(words: str) -> Stage:
        """The stage, with the drawing that a version of the code has."""
        source.write_text(f"def draw(result, folder):\n    (folder / 'page.md').write_text({words!r})\n    return ''\n")
        monkeypatch.delitem(sys.modules, source.stem, raising=False)
        importlib.invalidate_caches()
        return replace(GATE, render_page=importlib.import_module(source.stem).draw)

    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # two versions within a second would share it
    first, second, again = (run_gate(tracked_home, drawing(words)) for words in ("old", "newer", "newer"))
    assert (first, second, again) == ("old", "newer", "newer")
    assert calls == ["measure"]


def node(stage: str, sha256: str, *parents: Ancestor) -> Ancestor:
    return Ancestor(stage=stage, sha256=sha256, facts=(), parents=parents)


def test_the_nearest_result_of_each_stage_counts() -> None:
    old = node(
        "grpo", "g1", node("prepare_prompts", "p1"), node("reward_model", "r1", node("prepare_preferences", "d1"))
    )
    new = node("grpo", "g2", node("champion", "c1", old), node("reward_model", "r2", node("prepare_preferences", "d2")))
    assert nearest(new) == {
        "grpo": "g2",
        "champion": "c1",
        "reward_model": "r2",
        "prepare_preferences": "d2",
        "prepare_prompts": "p1",
    }


def test_a_recipe_is_all_but_the_start_and_data_count_by_their_rows(home: Home) -> None:
    for name, digest in (("s1", "d1"), ("s2", "d1"), ("s3", "d3")):
        folder = home.artifacts / "dataset" / name
        folder.mkdir(parents=True)
        write_json({"digest": digest}, folder / "report.json")

    def recipe(data: str, start: str, start_sha: str, seed: int = 0) -> str:
        inputs = {start: start_sha, "prepare_prompts": data, "reward_model": "r"}
        return recipe_of(home, {"arguments": {"start": start, "section": "grpo"}, "inputs": inputs, "seed": seed})

    first = recipe("s1", "sft", "x")
    assert recipe("s1", "champion", "y") == first
    assert recipe("s2", "champion", "z") == first
    assert recipe("s3", "champion", "z") != first
    assert recipe("s1", "champion", "y", seed=1) != first
    assert recipe("gone", "sft", "x") != first
