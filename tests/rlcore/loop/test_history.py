"""The history of a run: its rows, its file, and what a checkpoint has of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlcore.checks.health import HealthMonitor
from rlcore.config import HealthConfig
from rlcore.errors import CheckpointError
from rlcore.loop import train
from rlcore.loop.history import NAME, History
from tests.rlcore.loop.conftest import KilledError, MakeComponents, Tape


def with_rows(folder: Path, count: int) -> History:
    history = History(folder)
    for iteration in range(1, count + 1):
        history.append({"iteration": iteration, "reward/mean": 1.0 / iteration, f"odd/{iteration % 2}": 3})
    return history


def test_rows_come_back_as_they_were_and_from_the_file_bit_for_bit(tmp_path: Path) -> None:
    history = with_rows(tmp_path, 5)
    assert history[1] == {"iteration": 2, "reward/mean": 0.5, "odd/0": 3.0}
    assert [row["iteration"] for row in history[1:-1]] == [2, 3, 4]
    again = History(tmp_path)
    again.restore(history.seal())
    assert json.dumps(list(again)) == json.dumps(list(history))
    assert history.has("odd/1") and not history.has("odd/2")


def test_nothing_is_left_of_iterations_after_the_seal(tmp_path: Path) -> None:
    history = with_rows(tmp_path, 3)
    sealed = history.seal()
    history.append({"iteration": 4, "later": 1.0})
    history.seal()
    history.restore(sealed)
    assert len(history) == 3 and not history.has("later")
    history.restore({})
    assert list(history) == []


def test_the_size_of_a_checkpoint_does_not_depend_on_the_number_of_iterations(
    make_components: MakeComponents, tmp_path: Path
) -> None:
    sizes = {}
    for iterations in (2, 12):
        train(make_components(config={"num_iterations": iterations}, folder=f"run-{iterations}"), Tape())
        newest = max((tmp_path / f"run-{iterations}").glob("step-*"))
        sizes[iterations] = sum(path.stat().st_size for path in newest.iterdir())
        assert len((tmp_path / f"run-{iterations}" / NAME).read_text().splitlines()) == iterations
    assert abs(sizes[12] - sizes[2]) < 600  # the audit's window of 64 updates fills up


def test_a_run_whose_history_was_changed_goes_on_from_the_newest_checkpoint_that_it_agrees_with(
    make_components: MakeComponents, tmp_path: Path
) -> None:
    whole = train(make_components(folder="whole"), Tape())
    with pytest.raises(KilledError):
        train(make_components(), Tape(killed_in=4))
    path = tmp_path / "run" / NAME
    path.write_bytes(path.read_bytes()[:-5])  # within the row of iteration 3
    tape = Tape()
    outcome = train(make_components(), tape)
    assert [row["iteration"] for row in tape.rows] == [3, 4]
    assert [row["reward/mean"] for row in outcome.history] == [row["reward/mean"] for row in whole.history]
    assert (tmp_path / "run" / "damaged-step-000003").is_dir()


def test_a_history_that_is_gone_is_never_replaced_in_silence(make_components: MakeComponents, tmp_path: Path) -> None:
    with pytest.raises(KilledError):
        train(make_components(), Tape(killed_in=4))
    (tmp_path / "run" / NAME).unlink()
    with pytest.raises(CheckpointError, match="checkpoints are damaged"):
        train(make_components(), Tape())


class Counted(list[dict[str, float]]):
    """A history that counts how often a row is read."""

    reads = 0

    def __getitem__(self, place):  # type: ignore[no-untyped-def,override]
        self.reads += 1
        return super().__getitem__(place)


def test_to_judge_an_iteration_reads_as_many_rows_after_ten_thousand_as_after_ten() -> None:
    judge, history, reads = HealthMonitor(HealthConfig()), Counted(), []
    for iteration in range(1, 10_001):
        history.append({"iteration": iteration, "kl/ref": 0.1, "entropy": 1e-9, "eval/accuracy": 0.5})
        before = history.reads
        judge.update(history)
        reads.append(history.reads - before)
    assert max(reads[10:]) == reads[10] < 40
