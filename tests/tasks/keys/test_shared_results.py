"""Two state directories with one shared store: nothing is computed twice, and nothing depends on the store."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rlcore.tasks.keys import shared_results
from rlcore.tasks.keys.plan import look_up
from rlcore.tasks.run.stages import PipelineRun, run_stage
from rlcore.tasks.steps.base import StageContext, StageResult
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.shared import SharedStore, open_shared_store
from tests.tasks.run.toy_stages import DOUBLE, MAKE, calls, config, make_number, open_run, text

SLOW = 4.0  # seconds of the stage that others wait for


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SharedStore:
    calls.clear()
    monkeypatch.setenv("RLCORE_STORE", str(tmp_path / "shared"))
    for name, seconds in {"RENEWED": 0.1, "DEAD": 1.0, "LOOK": 0.05}.items():
        monkeypatch.setattr(shared_results, name, seconds)
    found = open_shared_store()
    assert found is not None
    return found


@pytest.fixture
def machines(tracked_home: Home, tmp_path: Path, store: SharedStore) -> tuple[PipelineRun, PipelineRun]:
    """Two state directories that share an MLflow server and a store."""
    first, other = open_run(tracked_home), Home(tmp_path / "other")
    for folder in (other.work, other.cache):
        folder.mkdir(parents=True)
    return first, replace(
        open_run(tracked_home), home=other, store=type(first.store)(other.root), cache=type(first.cache)(other.cache)
    )


def both(run: PipelineRun) -> tuple[ArtifactRef, ArtifactRef]:
    made = run_stage(MAKE, config(), {}, run)
    return made, run_stage(DOUBLE, config(), {"make": made}, run)


def states(home: Home) -> dict[str, str]:
    return {row.stage: row.state for row in look_up([MAKE, DOUBLE], config(), ["double"], home=home)[0]}


def test_another_machine_fetches_what_one_computed(machines: tuple[PipelineRun, PipelineRun]) -> None:
    first, second = machines
    assert states(second.home) == {"make": "run", "double": "run"}
    assert both(first) == both(second)
    assert calls == ["make", "double"]
    assert text(second, both(second)[1]) == "2"
    assert states(second.home) == {"make": "cached", "double": "cached"}


def test_the_present_result_of_a_key_is_published_and_none_of_before(
    machines: tuple[PipelineRun, PipelineRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = machines
    with monkeypatch.context() as alone:
        alone.delenv("RLCORE_STORE")
        made = run_stage(MAKE, config(), {}, first)
    record = first.cache.find("make", made.stage_key)
    assert record is not None
    folder = first.home.work / "other"
    folder.mkdir()
    (folder / "number.txt").write_text("1 again")
    again = first.store.commit(folder, kind="number", stage_key=made.stage_key)
    first.cache.write("make", replace(record, ref=again))
    assert run_stage(MAKE, config(), {}, first) == again
    assert run_stage(MAKE, config(), {}, second) == again
    assert calls == ["make"]


def test_plan_says_what_will_be_fetched(machines: tuple[PipelineRun, PipelineRun]) -> None:
    first, second = machines
    both(first)
    assert states(second.home) == {"make": "shared", "double": "shared"}
    assert not second.home.artifacts.exists()


def test_a_damaged_result_there_is_computed_again_and_replaced(
    machines: tuple[PipelineRun, PipelineRun], store: SharedStore, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = machines
    made = run_stage(MAKE, config(), {}, first)
    store.folder.write(f"{made.uri}/number.txt", b"3")
    assert run_stage(MAKE, config(), {}, second) == replace(made, mlflow_run_id=calls_run(second, made))
    assert calls == ["make", "make"]
    assert "computed again" in caplog.text
    assert store.folder.read(f"{made.uri}/number.txt") == b"1"


def calls_run(run: PipelineRun, made: ArtifactRef) -> str:
    record = run.cache.find("make", made.stage_key)
    assert record is not None
    return record.ref.mlflow_run_id


def make_slowly(context: StageContext) -> StageResult:
    time.sleep(SLOW)
    return make_number(context)


def test_who_comes_second_waits_and_computes_nothing(
    machines: tuple[PipelineRun, PipelineRun], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim is renewed: the wait is longer than the time after which a silent owner counts as dead."""
    monkeypatch.setattr(shared_results, "DEAD", SLOW - 1.0)  # many renewals: one may be late
    caplog.set_level(logging.INFO)
    slow, found = replace(MAKE, run=make_slowly), dict[int, ArtifactRef]()

    def work(number: int) -> None:
        found[number] = run_stage(slow, config(), {}, machines[number])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == ["make"]
    assert found[0] == found[1]
    assert "waiting, another worker computes it" in caplog.text
    assert "taking over" not in caplog.text


def test_the_claim_of_a_dead_process_is_taken_over(
    machines: tuple[PipelineRun, PipelineRun], store: SharedStore, caplog: pytest.LogCaptureFixture
) -> None:
    from rlcore.tasks.keys.cache_keys import key_of
    from rlcore.tasks.keys.key_inputs import key_inputs

    key = key_of(key_inputs(MAKE, config(), {}))
    assert store.claim("make", key, "gone 17 x")
    assert text(machines[0], run_stage(MAKE, config(), {}, machines[0])) == "1"
    assert "taking over from gone 17, which died" in caplog.text
    assert store.claimant("make", key) == ""


def test_a_failed_stage_leaves_no_claim(machines: tuple[PipelineRun, PipelineRun], store: SharedStore) -> None:
    def fail(context: StageContext) -> StageResult:
        raise ValueError("no")

    failing = replace(MAKE, run=fail)
    for run in machines:
        with pytest.raises(ValueError, match="no"):
            run_stage(failing, config(), {}, run)
    assert store.folder.sizes("claims") == {}


def test_without_an_answer_each_machine_computes_for_itself_and_publishes_later(
    machines: tuple[PipelineRun, PipelineRun],
    store: SharedStore,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "a file").write_text("")
    with monkeypatch.context() as away:
        away.setenv("RLCORE_STORE", str(tmp_path / "a file" / "store"))
        made = run_stage(MAKE, config(), {}, machines[0])
    assert "cannot be used" in caplog.text
    assert "the next run of this preset publishes it" in caplog.text
    assert run_stage(MAKE, config(), {}, machines[0]) == made
    assert run_stage(MAKE, config(), {}, machines[1]) == made
    assert calls == ["make"]


def test_a_cleaned_shared_result_is_made_again(machines: tuple[PipelineRun, PipelineRun], store: SharedStore) -> None:
    first, second = machines
    made = run_stage(MAKE, config(), {}, first)
    (published,) = store.published()
    assert not store.clean(published, before=published.time)  # published since
    assert store.clean(published, before=published.time + 1.0)
    assert list(store.published()) == []
    assert not store.clean(published, before=published.time + 1.0)
    assert states(second.home)["make"] == "run"
    assert text(second, run_stage(MAKE, config(), {}, second)) == "1"
    assert calls == ["make", "make"]
    assert store.clean(*store.published(), before=time.time() + 60.0)
    assert run_stage(MAKE, config(), {}, first) == made
    assert [each.uri for each in store.published()] == [made.uri]
    assert calls == ["make", "make"]


def test_a_result_that_is_here_is_found_without_reading_other_records_or_the_store(
    machines: tuple[PipelineRun, PipelineRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = both(machines[0])
    for reader in (type(machines[0].cache), SharedStore):
        monkeypatch.delattr(reader, "records")
    assert both(machines[0]) == made
