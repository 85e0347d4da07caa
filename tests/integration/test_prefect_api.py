"""Everything that needs Prefect's API, in one file: it takes as long to start as all other tests of a package."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import FlowFilter, FlowFilterName, FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import Artifact, State, TaskRun
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.client.schemas.sorting import FlowRunSort
from prefect.states import Cancelling, Completed, Crashed, Failed, Late, Pending, Running

from rlcore.errors import TrainingError
from rlcore.tasks.run import reconciliation
from rlcore.tasks.run.events import SNAPSHOT, STOPPED, emit_findings, emit_snapshot
from rlcore.tasks.run.leases import crash_flow_run, hold_lease, recover_dead_runs
from rlcore.tasks.run.prefect_bridge import (
    call_flow,
    current_flow_run,
    report_markdown,
    report_progress,
    task,
)
from rlcore.tasks.run.reconciliation import CRASHED, FAILED, HEAL, MISSED, look, reconcile, report_missed
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import read_json, write_json
from rlcore.tasks.tracking.runs import open_tracker
from tests.waiting import until

pytestmark = pytest.mark.prefect


@pytest.fixture(autouse=True)
def _under_prefect(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCORE_ENGINE", "prefect")


class Learner:
    """A live object: it cannot be copied, and a copy would be noticed."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def __deepcopy__(self, memo: object) -> Learner:
        raise AssertionError("a live object was copied")

    def __reduce__(self) -> Any:
        raise AssertionError("a live object was serialized")


@task(name="iteration", run_name="iteration {number}")
def iterate(learner: Learner, number: int, rate: float = 0.5) -> float:
    learner.steps.append(number)
    return rate * number


@task(name="train", run_name="train {name}")
def train(name: str, learner: Learner, source: ArtifactRef | None = None) -> ArtifactRef:
    for number in (1, 2):
        iterate(learner, number)
        report_progress(f"{name} iterations", number, 2)
    return ArtifactRef(kind="policy", uri=f"artifacts/policy/{name}", sha256=name, bytes=1)


@task(name="evaluate")
def evaluate(inputs: dict[str, ArtifactRef]) -> str:
    return ",".join(ref.sha256 for ref in inputs.values())


@task(name="burn")
def burn() -> None:
    raise TrainingError("the machine burns", where="here")


@flow(name="toy-pipeline", persist_result=False)
def toy_pipeline(fail: bool = False) -> dict[str, Any]:
    learner = Learner()
    first = train("sft", learner)
    second = train("grpo", learner, source=first)
    text = evaluate({"sft": first, "grpo": second})
    report_markdown("Summary", "# Done")
    if fail:
        burn()
    run = current_flow_run()
    return {"text": text, "steps": learner.steps, "run": run}


def test_under_prefect_tasks_nest_keep_live_objects_and_are_drawn_with_their_inputs() -> None:
    result = call_flow(toy_pipeline)
    assert (result["text"], result["steps"]) == ("sft,grpo", [1, 2, 1, 2])
    run = result["run"]
    assert (run.attempt, run.url.rpartition("/")[2]) == (1, run.flow_run_id)

    # The server records states from a queue, a little after the flow has ended.
    tasks = eventually(
        lambda: task_runs(run.flow_run_id),
        lambda found: len(found) == 7 and {each.state_name for each in found} == {"Completed"},
    )
    names = sorted(each.name for each in tasks)
    assert names == ["evaluate", *["iteration 1"] * 2, *["iteration 2"] * 2, "train grpo", "train sft"]
    by_name = {each.name: each for each in tasks}
    arrows = {
        name: {by_id(tasks, source.id) for source in each.task_inputs.get("wait_for", [])}
        for name, each in by_name.items()
    }
    assert arrows["train grpo"] == {"train sft"}
    assert arrows["evaluate"] == {"train sft", "train grpo"}
    inside = {by_id(tasks, parent.id) for parent in by_name["iteration 1"].task_inputs["__parents__"]}
    assert inside <= {"train sft", "train grpo"}

    shown = {each.key: each for each in artifacts(run.flow_run_id)}
    assert set(shown) == {"sft-iterations", "grpo-iterations", "summary"}
    assert shown["sft-iterations"].data == 100.0
    assert shown["summary"].data == "# Done"


def test_under_prefect_an_error_is_the_error_itself() -> None:
    with pytest.raises(TrainingError) as raised:
        call_flow(toy_pipeline, fail=True)
    assert (raised.value.what, raised.value.where) == ("the machine burns", "here")


def task_runs(flow_run_id: str) -> list[TaskRun]:
    with get_client(sync_client=True) as client:
        return client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id])))


def artifacts(flow_run_id: str) -> list[Artifact]:
    with get_client(sync_client=True) as client:
        return client.read_artifacts(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id])))


def by_id(tasks: list[TaskRun], identifier: object) -> str:
    return next(each.name for each in tasks if each.id == identifier)


def eventually(read: Callable[[], list[Any]], done: Callable[[list[Any]], bool]) -> list[Any]:
    """Records of task runs and events reach the database a little after the run itself."""
    return until(lambda: found if done(found := read()) else [], "all records")


@flow(name="toy-events", persist_result=False)
def toy_events(config: Any, folder: Path) -> None:
    ref = ArtifactRef(kind="dataset", uri="", sha256="abc", bytes=1, rows=5, contract="preference_pairs/v2")
    emit_snapshot(config, "prepare_preferences", ref)
    write_json({"findings": [], "stopped": {"text": "stopped after iteration 3"}}, folder / "health.json")
    emit_findings("toy", "grpo", folder)


def test_a_snapshot_and_a_stop_are_events_of_their_flow_run(tmp_path: Path) -> None:
    call_flow(toy_events, SimpleNamespace(name="toy", retrain=object()), tmp_path)
    with get_client(sync_client=True) as client:
        run = client.read_flow_runs(
            flow_filter=FlowFilter(name=FlowFilterName(any_=["toy-events"])),
            sort=FlowRunSort.EXPECTED_START_TIME_DESC,
            limit=1,
        )[0]
        question = {"filter": {"related": {"id": [f"prefect.flow-run.{run.id}"]}, "event": {"prefix": ["rlcore."]}}}
        found = eventually(
            lambda: client._client.post("/events/filter", json=question).json()["events"], lambda got: len(got) == 2
        )
    made = {each["event"]: each for each in found}
    snapshot = made[SNAPSHOT]["resource"]
    assert (snapshot["rlcore.stage"], snapshot["rlcore.retrain"]) == ("prepare_preferences", "yes")
    assert snapshot["prefect.resource.id"] == "rlcore.dataset.abc"
    assert made[STOPPED]["resource"]["prefect.resource.name"] == "grpo of toy"


def test_a_dead_flow_run_is_crashed_once_and_a_later_attempt_is_not(tracked_home: Home) -> None:
    @flow(name="toy")
    def toy() -> None: ...

    open_tracker(tracked_home).start_run("toy", "pipeline", tags={"lease": "dead"})
    with get_client(sync_client=True) as client:
        identifier = client.create_flow_run(toy).id
        client.set_flow_run_state(identifier, Running())
        attempt = client.read_flow_run(identifier).run_count
        assert not crash_flow_run(str(identifier), attempt=attempt - 1, reason="died")  # it goes on as a later attempt
        lease = {"host": "here", "pid": 1234, "experiment": "toy", "flow_run_id": str(identifier)}
        (tracked_home.leases / "dead.json").write_text(json.dumps(lease | {"attempt": attempt}))
        lines = recover_dead_runs(tracked_home)
        assert [f"Prefect flow run {identifier} marked CRASHED" in line for line in lines] == [False, True]
        state = client.read_flow_run(identifier).state
    assert state is not None
    assert state.is_crashed()
    assert "process 1234 on here died" in str(state.message)
    assert not crash_flow_run(str(identifier), attempt=attempt, reason="died")
    assert not crash_flow_run(str(UUID(int=0)), attempt=1, reason="died")


@pytest.fixture
def pool() -> Iterator[Callable[..., UUID]]:
    with get_client(sync_client=True) as client:
        name = client.create_work_pool(WorkPoolCreate(name="toy-pool", type="process"), overwrite=True).name
        flow_id = client.create_flow_from_name("toy-pooled")

        def queue(
            *states: State[Any], tags: Sequence[str] = (HEAL,), worker: str = "local", kind: str = "process"
        ) -> UUID:
            deployment = client.create_deployment(flow_id, name="toy", work_pool_name=name)
            run = client.create_flow_run_from_deployment(deployment, tags=tags)
            for state in states:
                client.set_flow_run_state(run.id, state, force=True)
            client.update_flow_run_labels(run.id, {"prefect.worker.name": worker, "prefect.worker.type": kind})
            return run.id

        yield queue


def reconciled(home: Home, run: UUID, *, later: bool = True) -> tuple[str, list[str]]:
    """The state of a run after a look by a worker that began after it was taken, or before."""
    started = datetime.now(UTC) + (timedelta(seconds=1) if later else -timedelta(hours=1))
    with get_client(sync_client=True) as client:
        lines = list(reconcile(client, home, pool="toy-pool", worker="local", started=started))
        return str(client.read_flow_run(run).state_name), [line for line in lines if str(run) in line]


def test_a_run_that_an_earlier_worker_has_left_goes_on_and_that_of_another_is_left_alone(
    home: Home, pool: Callable[..., UUID]
) -> None:
    dead, lost, other = pool(Pending(), Running()), pool(Pending()), pool(Pending(), Running(), worker="other")
    job = pool(Pending(), Running(), kind="kubernetes")  # its process is nowhere near
    fresh, unhealed = pool(Pending(), Running()), pool(Pending(), Running(), tags=())
    assert reconciled(home, fresh, later=False) == ("Running", [])  # its own worker may be about to say how it ended
    state, (line,) = reconciled(home, dead)
    assert (state, "was Running, and resumes" in line) == ("AwaitingRetry", True)
    assert reconciled(home, lost) == ("AwaitingRetry", [])  # by the same look
    assert reconciled(home, unhealed)[0] == "Crashed"
    unheard = pool(Pending(), Running(), Cancelling())
    assert reconciled(home, unheard)[0] == "Cancelled"
    assert [reconciled(home, each) for each in (other, job)] == [("Running", [])] * 2


def test_a_run_that_was_called_crashed_goes_on_or_runs_as_its_lease_says(
    home: Home, pool: Callable[..., UUID], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = pool(Pending(), Running(), Crashed())
    with hold_lease(home, experiment="toy", flow_run_id=str(run), attempt=1):
        assert reconciled(home, run) == ("Crashed", [])  # it may have said so itself, in its last seconds
        monkeypatch.setattr(reconciliation, "SETTLED_SECONDS", 0.0)
        assert reconciled(home, run)[0] == "Running"
        assert reconciled(home, run) == ("Running", [])
    assert reconciled(home, run)[0] == "AwaitingRetry"
    never_began = pool(Pending(), Crashed())
    assert reconciled(home, never_began) == ("Crashed", [])


def notices(home: Home) -> list[tuple[str, str]]:
    found = [read_json(path) for path in sorted((home.root / "outbox").glob("*.json"))]
    return [(each["event"], each["text"]) for each in found]


def test_one_run_whose_state_cannot_be_set_keeps_no_other_dead_and_does_not_keep_its_place(
    home: Home, pool: Callable[..., UUID], monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck, gone, dead = (pool(Pending(), Running()) for _ in range(3))
    real = SyncPrefectClient.set_flow_run_state

    def set_state(client: SyncPrefectClient, run: UUID, state: State[Any], force: bool = False) -> object:
        if run == gone or (run == stuck and state.is_scheduled()):
            raise ValueError("409: this deployment has other parameters now")
        return real(client, run, state, force=force)

    monkeypatch.setattr(SyncPrefectClient, "set_flow_run_state", set_state)
    started = datetime.now(UTC) + timedelta(seconds=1)
    lines = look(home, pool="toy-pool", worker="local", started=started)
    with get_client(sync_client=True) as client:
        assert [client.read_flow_run(run).state_name for run in (stuck, gone, dead)] == [
            "Crashed",
            "Running",
            "AwaitingRetry",
        ]
    for run in (stuck, gone):
        assert any(f"({run}) cannot be handled: ValueError: 409" in line for line in lines)
    assert [event for event, _ in notices(home)] == [CRASHED]
    assert notices(home)[0][1].endswith("its process died; it resumes from the cache and its newest checkpoint")


def test_a_failed_run_of_any_deployment_is_reported_once(
    home: Home, pool: Callable[..., UUID], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = pool(Pending(), Running(), Failed(message="DataError: row 3 lacks 'prompt'"), tags=())
    crashed = pool(Pending(), Running(), Crashed(message="exit code 137"), tags=())
    pool(Pending(), Running(), Completed())
    monkeypatch.setattr(reconciliation, "_SETTLED", timedelta(0))
    for _ in range(2):
        look(home, pool="toy-pool", worker="local", started=datetime.now(UTC))
    with get_client(sync_client=True) as client:
        names = [client.read_flow_run(run).name for run in (failed, crashed)]
    own = [each for each in notices(home) if each[1].partition(" ")[0] in names]
    assert own == [
        (FAILED, f"{names[0]} (toy): DataError: row 3 lacks 'prompt'"),
        (CRASHED, f"{names[1]} (toy): exit code 137"),
    ]


def test_a_scheduled_run_that_did_not_start_before_the_next_one_is_reported_once(home: Home) -> None:
    begin = datetime.now(UTC) - timedelta(hours=3)
    with get_client(sync_client=True) as client:
        pool = client.create_work_pool(WorkPoolCreate(name="late-pool", type="process"), overwrite=True).name
        flow_id = client.create_flow_from_name("toy-late")
        deployment = client.create_deployment(flow_id, name="nightly", work_pool_name=pool)
        hourly = IntervalSchedule(interval=timedelta(hours=1), anchor_date=begin)
        client._client.post(f"/deployments/{deployment}/schedules", json=[{"schedule": hourly.model_dump(mode="json")}])
        backfill = {"start_time": begin.isoformat(), "end_time": datetime.now(UTC).isoformat(), "max_runs": 2}
        assert client._client.post(f"/deployments/{deployment}/schedule", json=backfill).is_success
        of_flow = FlowFilter(name=FlowFilterName(any_=["toy-late"]))
        planned = client.read_flow_runs(flow_filter=of_flow, sort=FlowRunSort.EXPECTED_START_TIME_ASC, limit=2)
        assert all(run.auto_scheduled for run in planned)
        for run in planned:
            client.set_flow_run_state(run.id, Late(), force=True)
        for _ in range(2):
            (line,) = report_missed(client, home, pool)
            assert planned[0].name in line
    ((event, text),) = notices(home)
    assert event == MISSED
    assert text.startswith(f"{planned[0].name} (nightly): the run of ") and text.endswith("before the next one was due")
