"""The lab of silent faults: its supervised faults are stopped, and its sound stages are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.faults.__main__ import IN_RUNS, OUTSIDE, play, written
from benchmarks.faults.lab import Patches
from benchmarks.faults.supervised import SOUND, SUPERVISED

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "faults.jsonl"
ROWS = [(name, verdict.caught) for name, verdict in written(RESULTS).items()]


def test_the_table_has_every_fault() -> None:
    assert [name for name, _ in ROWS] == [*IN_RUNS, *OUTSIDE]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "caught"), ROWS, ids=[name for name, _ in ROWS])
def test_what_comes_of_a_fault_is_what_the_table_says(fault: str, caught: str) -> None:
    verdict = play(fault)
    assert verdict.caught == caught, verdict


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("reward model: all labels are swapped, with 50 anchors", "prefers the losers"),
        ("SFT: the end is not trained on", "the end of a turn is not trained on"),
    ],
)
def test_a_fault_is_stopped_by_its_message(fault: str, said: str) -> None:
    verdict = SUPERVISED[fault](Patches())
    assert (verdict.caught, said in verdict.message) == ("stopped", True), verdict


def test_a_fault_in_a_run_is_stopped_by_what_the_audit_found() -> None:
    verdict = play("random rewards")
    assert verdict.caught == "stopped"
    assert "the reward 'math': expected " in verdict.message, verdict


def test_sound_pairs_are_left_alone() -> None:
    assert SOUND["reward model, with 50 anchors"](Patches()).caught == "silent"
