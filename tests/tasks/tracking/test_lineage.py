"""The origin of a model, and traces of its rollouts."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Barrier

import pytest
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

from rlcore.config import HardwareConfig, to_dict
from rlcore.errors import ModelError
from rlcore.hardware.machine import find_machine
from rlcore.tasks.kinds.kind import Stage
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.sections import Sections, sections_of
from rlcore.tasks.run.pipeline import run_pipeline
from rlcore.tasks.steps.base import StageContext, StageResult
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.cache import describe_machine
from rlcore.tasks.store.code_hash import pins_digest
from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking.lineage import find_lineage, tree_text
from rlcore.tasks.tracking.runs import open_tracker
from rlcore.tasks.tracking.traces import Step, Trace, log_traces
from tests.tasks.homes import copy_home, new_home
from tests.toys import ToyConfig, no_sections


def hardware(config: RunConfig) -> Sections:
    return sections_of(config, ("hardware",))


def rows_digest(config: Sections) -> str:
    return "f" * 64


def rows(context: StageContext) -> StageResult:
    report = {"contract": "prompts/v1", "source": "sums.jsonl", "digest": "d" * 64}
    (context.folder / "report.json").write_text(json.dumps(report))
    return StageResult(metrics={}, rows=12)


def train(context: StageContext) -> StageResult:
    (context.folder / "model").mkdir()
    (context.folder / "model" / "config.json").write_text(json.dumps(sorted(context.inputs)))
    return StageResult(metrics={})


def iterate(context: StageContext) -> StageResult:
    return dataclasses.replace(train(context), rows=4)


ROWS = Stage(name="rows", artifact="dataset", run=rows, sections=no_sections, source_digest=rows_digest)
SFT = Stage(name="sft", artifact="checkpoint", run=train, sections=hardware, inputs=("rows",), registered_as="1")
GRPO = Stage(name="grpo", artifact="policy", run=iterate, sections=hardware, inputs=("sft", "rows"), registered_as="2")


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory, _empty_mlflow_database: Path
) -> tuple[Home, Mapping[str, ArtifactRef]]:
    with new_home(tmp_path_factory.mktemp("made"), _empty_mlflow_database) as home:
        return home, run_pipeline([ROWS, SFT, GRPO], ToyConfig.run(), ["grpo"], home=home, experiment="toy")


@pytest.fixture
def refs(made: tuple[Home, Mapping[str, ArtifactRef]], home: Home) -> Mapping[str, ArtifactRef]:
    copy_home(made[0], home)
    return made[1]


def test_a_model_is_traced_to_the_digest_of_its_rows(home: Home, refs: Mapping[str, ArtifactRef]) -> None:
    tags, root = find_lineage(home, "toy-2/1")
    assert (root.stage, root.sha256) == ("grpo", refs["grpo"].sha256)
    sft, data = root.parents
    assert (sft.stage, data.stage) == ("sft", "rows")
    assert sft.parents == (data,)
    assert data.facts[:4] == ("12 rows", f"source {'f' * 12}", "prompts/v1 from sums.jsonl", f"rows' digest {'d' * 12}")
    assert (tags["preset"], tags["parents"]) == ("toy", f"sft:{refs['sft'].sha256}")
    assert tags["data"] == f"rows:{refs['rows'].sha256}"
    assert "torch==" in tags["versions"]
    assert "python==3" in tags["versions"]
    assert tags["environment"] == pins_digest()
    machine = describe_machine(to_dict(find_machine(HardwareConfig())))
    assert (tags["machine"], sft.facts[0], root.facts[:2]) == (machine, machine, ("4 iterations", machine))
    assert machine not in data.facts
    text = tree_text(tags, root)
    assert f"  machine: {machine}\n" in text
    assert text.startswith("toy-2 version 1\n")
    assert [line.split()[0] for line in text.splitlines()[-4:]] == ["grpo", "sft", "rows", "rows"]


def test_a_result_without_a_record_stands_by_its_digest(home: Home, refs: Mapping[str, ArtifactRef]) -> None:
    (record,) = (home.cache / "sft").glob("*.json")
    record.unlink()
    _, root = find_lineage(home, "toy-2/1")
    assert root.parents[0].facts == ("no record in this state directory",)
    assert root.parents[0].sha256 == refs["sft"].sha256


def test_a_model_that_is_not_there_or_not_ours_is_an_error(home: Home, refs: Mapping[str, ArtifactRef]) -> None:
    for name in ("toy-2@champion", "toy-2/7", "nothing/1", "toy-2"):
        with pytest.raises(ModelError, match="no registered model"):
            find_lineage(home, name)
    (record,) = (home.cache / "grpo").glob("*.json")
    record.unlink()
    with pytest.raises(ModelError, match="no stage of this state directory"):
        find_lineage(home, "toy-2/1")


def test_traces_are_listed_in_their_order_with_their_tags_and_belong_to_their_run(tracked_home: Home) -> None:
    tracker = open_tracker(tracked_home)
    with tracker.start_run("traced", "grpo", tags={}) as run, tracker.start_run("traced", "other", tags={}) as other:
        traces = [
            Trace(inputs={"prompt": f"{n}+1"}, outputs={"completion": f"#### {n + 1}"}, tags={"kind": kind})
            for n, kind in enumerate(("best", "worst", "middle"))
        ]
        log_traces(tracker, run.run_id, traces)
        log_traces(tracker, other.run_id, [])
        places = [run.experiment_id]
        found = tracker.client.search_traces(locations=places, run_id=run.run_id)
        assert [trace.info.tags["kind"] for trace in found] == ["best", "worst", "middle"]
        (span,) = found[1].data.spans
        assert (span.inputs, span.outputs) == ({"prompt": "1+1"}, {"completion": "#### 2"})
        assert len(tracker.client.search_traces(locations=places, filter_string="tags.kind = 'best'")) == 1
        assert len(tracker.client.search_traces(locations=places, run_id=other.run_id)) == 0


def test_a_trace_with_steps_is_a_tree_of_spans_in_their_order(tracked_home: Home) -> None:
    tracker = open_tracker(tracked_home)
    turns = tuple(Step(name=f"turn {n}", inputs={}, outputs={"text": str(n)}) for n in (1, 2))
    branch = Step(name="branch 1", inputs={"fork": "another history"}, outputs={"text": "3"}, steps=turns[:1])
    trace = Trace(inputs={"prompt": "1+1"}, outputs={"completion": "2"}, tags={}, steps=(*turns, branch))
    with tracker.start_run("traced", "grpo", tags={}) as run:
        log_traces(tracker, run.run_id, [trace])
        (found,) = tracker.client.search_traces(locations=[run.experiment_id], run_id=run.run_id)
    spans = sorted(found.data.spans, key=lambda span: span.start_time_ns)
    names = {span.span_id: span.name for span in spans}
    assert [(span.name, names.get(span.parent_id or "")) for span in spans] == [
        ("rollout", None),
        ("turn 1", "rollout"),
        ("turn 2", "rollout"),
        ("branch 1", "rollout"),
        ("turn 1", "branch 1"),
    ]
    assert spans[3].inputs == {"fork": "another history"}


def three() -> list[Trace]:
    return [Trace(inputs={"n": n}, outputs={"n": n}, tags={"kind": "best"}) for n in range(3)]


def test_traces_that_a_killed_call_has_stored_already_are_not_stored_again(tracked_home: Home) -> None:
    tracker = open_tracker(tracked_home)
    with tracker.start_run("traced", "grpo", tags={}) as run:
        log_traces(tracker, run.run_id, three()[:2])
        log_traces(tracker, run.run_id, three())
        found = tracker.client.search_traces(locations=[run.experiment_id], run_id=run.run_id)
    assert sorted(trace.data.spans[0].inputs["n"] for trace in found) == [0, 1, 2]


@pytest.mark.parametrize("last", ["log_spans", "start_trace"])
def test_a_half_stored_trace_is_completed(tracked_home: Home, monkeypatch: pytest.MonkeyPatch, last: str) -> None:
    """A kill between two transactions of MLflow; tests/chaos kills there in earnest."""
    tracker = open_tracker(tracked_home)

    def killed(*_: object, **__: object) -> None:
        raise RuntimeError("killed")

    with tracker.start_run("traced", "grpo", tags={}) as run:
        with monkeypatch.context() as patched:
            patched.setattr(SqlAlchemyStore, last, killed)
            with pytest.raises(RuntimeError, match="killed"):
                log_traces(tracker, run.run_id, three())
        log_traces(tracker, run.run_id, three())
        found = tracker.client.search_traces(locations=[run.experiment_id], run_id=run.run_id)
    assert sorted(trace.data.spans[0].outputs["n"] for trace in found) == [0, 1, 2]
    assert all(trace.info.tags["kind"] == "best" and trace.info.state == "OK" for trace in found)
    assert count(tracked_home) == 3


def test_two_that_store_the_same_traces_at_once_store_each_once(tracked_home: Home) -> None:
    tracker = open_tracker(tracked_home)
    with tracker.start_run("traced", "grpo", tags={}) as run:
        together = Barrier(2)

        def store(_: int) -> None:
            together.wait()
            log_traces(open_tracker(tracked_home), run.run_id, three())

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(store, range(2)))
    assert count(tracked_home) == 3


def test_the_clock_has_no_part_in_when_a_trace_was(tracked_home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = open_tracker(tracked_home)
    with tracker.start_run("traced", "grpo", tags={}) as run:
        pass
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    log_traces(tracker, run.run_id, three())
    end = tracker.client.get_run(run.run_id).info.end_time
    assert isinstance(end, int)
    found = tracker.client.search_traces(locations=[run.experiment_id], run_id=run.run_id)
    assert [trace.info.request_time for trace in found] == [end, end - 1, end - 2]


def test_a_run_that_mlflow_does_not_have_gets_no_traces(tracked_home: Home) -> None:
    log_traces(open_tracker(tracked_home), "0" * 32, three())
    assert count(tracked_home) == 0


def count(home: Home) -> int:
    with closing(sqlite3.connect(home.root / "mlflow.db")) as database:
        return int(database.execute("SELECT count(*) FROM trace_info").fetchone()[0])
