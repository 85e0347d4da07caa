"""Checkpoints that a stage continues, with a toy trainer whose state depends on every iteration, killed anywhere."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from rlcore.tasks.keys import earlier_work
from rlcore.tasks.keys.plan import look_up
from rlcore.tasks.kinds.kind import Continuation, Stage
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.sections import Sections
from rlcore.tasks.run import stages
from rlcore.tasks.run.stages import PipelineRun, run_stage
from rlcore.tasks.steps.base import StageContext, StageResult
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.cache import StageCache
from rlcore.tasks.store.code_hash import NOTHING_CHOSEN
from rlcore.tasks.store.locks import file_lock
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import note_digest
from rlcore.training.manifest import write_manifest
from tests.tasks.run.toy_stages import open_run
from tests.toys import ToyConfig


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Settings of the toy: its length, a rate, and what only watches it."""

    length: int = 4
    rate: int = 3
    watch: int = 1
    limit: int = 10**9
    bound: str = ""
    settings: None = None  # of a library


@dataclass(frozen=True, kw_only=True)
class LoopConfig(ToyConfig):
    loop: Loop = field(default_factory=Loop)


class Killed(BaseException):
    """Stands for SIGKILL: no handler of ours catches it."""


kill_after: list[int] = []
trained: list[int] = []


def sections(config: RunConfig) -> Sections:
    loop = cast(LoopConfig, config).loop
    return Sections({"stage": loop, "rules": {"limit": loop.limit}})


def stop(history: Sequence[Mapping[str, float]], config: Sections) -> Mapping[str, Any] | None:
    over = (row for row in history if row["value"] > config.rules["limit"])
    return next(({"rule": "limit", "iteration": row["iteration"]} for row in over), None)


def recorded(folder: Path) -> tuple[list[dict[str, float]], Mapping[str, Any] | None]:
    found = json.loads((folder / "result.json").read_text())
    return found["history"], found["stop"]


def train(context: StageContext) -> StageResult:
    """Iterate from the newest checkpoint: the value of an iteration depends on all before it."""
    loop, root = context.config.stage, context.work / "checkpoints"
    tables = context.work / "rollouts"
    tables.mkdir(exist_ok=True)
    done = max((int(path.name[5:]) for path in root.glob("step-*")), default=0)
    lines = (root / "history.jsonl").read_text().splitlines()[:done] if done else []
    history = [json.loads(line) for line in lines]
    while len(history) < loop.length and stop(history, context.config) is None:
        number = len(history) + 1
        value = (history[-1]["value"] if history else 1) * loop.rate + number
        history.append({"iteration": number, "value": value})
        trained.append(number)
        context.tracker.log_metrics({"value": value}, step=number)
        (tables / f"iteration-{number:05d}.parquet").write_text(str(value))
        note_digest(tables / f"iteration-{number:05d}.parquet")
        context.tracker.flush()
        if stop(history, context.config) is None:
            checkpoint(root, number, history, context.checkpoint_key)
        if number in kill_after:
            raise Killed
    shutil.copytree(tables, context.folder / "rollouts")
    found = {"history": history, "stop": stop(history, context.config)}
    (context.folder / "result.json").write_text(json.dumps(found))
    return StageResult(metrics={"value": history[-1]["value"]})


def checkpoint(root: Path, number: int, history: Sequence[Mapping[str, float]], key: str) -> None:
    folder = root / f"step-{number:06d}"
    folder.mkdir(parents=True)
    (root / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in history))
    for name in ("policy", "optimizer"):
        (folder / f"{name}.safetensors").write_text(str(history[-1]["value"]))
    state = {"run": {"identity": {"stage": key}}, "learner": {"num_skipped": 0}}
    (folder / "state.json").write_text(json.dumps(state))
    write_manifest(folder)


LOOP = Stage(
    name="loop",
    artifact="policy",
    run=train,
    sections=sections,
    chosen=lambda _: NOTHING_CHOSEN,
    observers=("stage.watch", "stage.limit", "rules"),
    continuation=Continuation(length="length", bound=lambda loop: loop.bound, stop=stop, recorded=recorded),
)


@pytest.fixture
def run(tracked_home: Home) -> PipelineRun:
    kill_after.clear()
    trained.clear()
    return open_run(tracked_home)


def made(run: PipelineRun, **settings: Any) -> ArtifactRef:
    trained.clear()
    return run_stage(LOOP, LoopConfig.run(loop=Loop(**settings)), {}, run)


def killed(run: PipelineRun, after: int, **settings: Any) -> None:
    kill_after.append(after)
    with pytest.raises(Killed):
        made(run, **settings)
    kill_after.clear()


def planned(run: PipelineRun, name: str = "toy", **settings: Any) -> tuple[str, str]:
    ((row,), _) = look_up([LOOP], LoopConfig.run(name=name, loop=Loop(**settings)), ["loop"], home=run.home)
    return row.state, row.reason


def values(run: PipelineRun, ref: ArtifactRef) -> list[int]:
    tables = sorted((run.store.path(ref) / "rollouts").iterdir())
    found = [row["value"] for row in recorded(run.store.path(ref))[0]]
    assert [int(path.read_text()) for path in tables] == found
    return found


def at_once(length: int, rate: int = 3) -> list[int]:
    found = [1]
    for number in range(1, length + 1):
        found.append(found[-1] * rate + number)
    return found[1:]


def test_a_finished_run_is_extended_and_its_curve_goes_on_in_a_run_that_names_it(run: PipelineRun) -> None:
    first = made(run)
    assert planned(run, length=6) == ("run", "extends from 4 to 6")
    second = made(run, length=6)
    assert (values(run, second), trained) == (at_once(6), [5, 6])
    client = run.tracker.client
    points = client.get_metric_history(second.mlflow_run_id, "value")
    assert [(each.step, each.value) for each in points] == list(enumerate(map(float, at_once(6)), start=1))
    assert client.get_run(second.mlflow_run_id).data.tags["continues"] == first.mlflow_run_id
    assert values(run, first) == at_once(4)
    assert [planned(run, length=each)[0] for each in (4, 6)] == ["cached", "cached"]
    assert list(run.home.work.iterdir()) == []


def test_the_checkpoints_of_the_last_run_of_each_preset_and_stage_stay(run: PipelineRun) -> None:
    for settings in ({}, {"rate": 2}, {"rate": 2, "length": 6}):
        made(run, **settings)
        (kept,) = run.home.checkpoints.glob("*/*")
        newest = max((kept / "checkpoints").glob("step-*"))
        assert (kept.relative_to(run.home.checkpoints).as_posix(), newest.name[-1]) == (
            "toy/loop",
            str(settings.get("length", 4)),
        )


def test_a_killed_run_resumes_with_another_length_and_stays_as_it_was(run: PipelineRun) -> None:
    killed(run, 3)
    assert planned(run) == ("run", "resumes at iteration 4 of 4")
    assert planned(run, length=6) == ("run", "resumes at iteration 4 of 6")
    assert planned(run, length=2) == ("run", "resumes after iteration 2 of 2, the last")
    longer = made(run, length=6)
    assert (values(run, longer), trained) == (at_once(6), [4, 5, 6])
    shorter = made(run, length=2)
    assert (values(run, shorter), trained) == (at_once(2), [])
    assert (values(run, made(run)), trained) == (at_once(4), [4])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"rate": 5}, "restarts: rate changed (3 -> 5)"),
        ({"rate": 5, "length": 6}, "restarts: length changed (4 -> 6), rate changed (3 -> 5)"),
    ],
)
def test_a_change_of_weights_restarts_with_a_reason(run: PipelineRun, settings: dict[str, Any], reason: str) -> None:
    made(run)
    assert planned(run, **settings) == ("run", reason)
    length, rate = settings.get("length", 4), settings.get("rate", 3)
    assert values(run, made(run, **settings)) == at_once(length, rate)
    assert trained == list(range(1, length + 1))


def test_a_stage_that_another_process_runs_is_planned_as_running_with_what_is_saved(run: PipelineRun) -> None:
    killed(run, 3)
    (folder,) = (path for path in run.home.work.iterdir() if path.is_dir())
    with file_lock(folder.with_suffix(".lock")):
        assert planned(run) == ("running", "iteration 3 of 4 is saved")


def test_the_same_work_of_another_preset_is_continued_and_other_work_of_it_explains_nothing(run: PipelineRun) -> None:
    killed(run, 3)
    assert planned(run, "copy") == ("run", "resumes at iteration 4 of 4")
    made(run)
    assert planned(run, "copy") == ("cached", "")
    assert planned(run, "copy", length=6) == ("run", "extends from 4 to 6")
    assert planned(run, "copy", rate=5) == ("run", "first run of this preset")


def test_fewer_iterations_take_the_checkpoint_of_their_number_or_restart(run: PipelineRun) -> None:
    made(run)
    assert planned(run, length=3) == ("run", "resumes after iteration 3 of 3, the last")
    assert (values(run, made(run, length=3)), trained) == (at_once(3), [])
    shutil.rmtree(next(run.home.checkpoints.glob("*/*/checkpoints/step-000001")))
    reason = "restarts: length changed (3 -> 1): no usable checkpoint up to 1 is kept"
    assert planned(run, length=1) == ("run", reason)


def test_a_length_that_early_iterations_depend_on_restarts_and_says_why(run: PipelineRun) -> None:
    made(run, bound="the schedule ends with it")
    reason = "restarts: length changed (4 -> 6): the schedule ends with it"
    assert planned(run, bound="the schedule ends with it", length=6) == ("run", reason)
    made(run, bound="the schedule ends with it", length=6)
    assert trained == [1, 2, 3, 4, 5, 6]


def test_what_only_watches_serves_the_result_and_is_named(run: PipelineRun) -> None:
    first = made(run)
    note = "weights and recorded curve are reused although watch changed (1 -> 2)"
    assert planned(run, watch=2) == ("cached", note)
    assert made(run, watch=2) == first
    assert trained == []


def test_a_rule_that_stops_a_run_has_a_result_of_its_own_and_both_stay(run: PipelineRun) -> None:
    whole = made(run)
    tight = {"limit": at_once(4)[1]}  # stops in the third iteration
    stops = "health.limit stops the earlier run after iteration 3"
    assert planned(run, **tight) == ("run", f"restarts: {stops}")
    stopped = made(run, **tight)
    assert (values(run, stopped), trained) == (at_once(3), [1, 2, 3])
    assert [made(run), made(run, **tight), made(run, limit=999)] == [whole, stopped, whole]
    assert stopped.stage_key != whole.stage_key
    assert run.cache.find("loop", stopped.stage_key) is not None


def test_a_stopped_run_goes_on_from_its_last_checkpoint_without_the_rule(run: PipelineRun) -> None:
    made(run, limit=at_once(4)[1])
    reason = "resumes at iteration 3 of 4: health.limit stopped the earlier run after iteration 3, and no longer does"
    assert planned(run) == ("run", reason)
    assert (values(run, made(run)), trained) == (at_once(4), [3, 4])


def test_a_killed_run_that_a_new_rule_would_have_stopped_restarts(run: PipelineRun) -> None:
    killed(run, 3)
    stopped = made(run, limit=at_once(4)[1])
    assert (values(run, stopped), trained) == (at_once(3), [1, 2, 3])


@pytest.mark.parametrize("damage", ["checkpoint", "artifact"])
def test_damaged_work_is_not_continued(run: PipelineRun, damage: str) -> None:
    first = made(run)
    if damage == "checkpoint":
        (policy, *others) = run.home.checkpoints.glob("*/*/checkpoints/step-*/policy.safetensors")
        for path in (policy, *others):
            path.write_text("other")
    else:
        (run.store.path(first) / "result.json").write_text("{}")
    assert planned(run, length=6)[1].endswith("no usable checkpoint up to 6 is kept")
    assert values(run, made(run, length=6)) == at_once(6)


WRITES = [
    (earlier_work, "link_or_copy"),
    (earlier_work, "write_json"),
    (earlier_work, "note_digest"),
    (earlier_work, "sync"),
    (stages, "close_work"),
    (StageCache, "write"),
    (Path, "rename"),
    (shutil, "rmtree"),
]


@pytest.mark.parametrize(("owner", "name"), WRITES, ids=[name for _, name in WRITES])
@pytest.mark.parametrize("is_before", [True, False])
def test_killed_at_any_write_of_an_extension_the_next_start_ends_with_the_same_bits(
    run: PipelineRun, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, is_before: bool
) -> None:
    made(run)
    original, kills = getattr(owner, name), 0
    for call in range(30):
        left = [call]

        def dying(*given: Any, left: list[int] = left, **named: Any) -> Any:
            left[0] -= 1
            if left[0] == -1 and is_before:
                raise Killed
            done = original(*given, **named)
            if left[0] == -1:
                raise Killed
            return done

        with monkeypatch.context() as patched:
            patched.setattr(owner, name, dying)
            try:
                ref = made(run, length=6)
            except Killed:
                kills += 1
                continue
            break
    assert kills
    assert values(run, ref) == at_once(6)
    assert [path.name for path in run.home.work.iterdir() if not path.name.endswith(".lock")] == []
    assert planned(run, length=8) == ("run", "extends from 6 to 8")
    assert values(run, run_stage(LOOP, replace(LoopConfig.run(loop=Loop(length=8))), {}, run)) == at_once(8)
