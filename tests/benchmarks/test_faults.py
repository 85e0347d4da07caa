"""The lab of silent faults: its supervised faults are stopped, and its sound stages are not."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.faults.__main__ import FAULTS, play, written
from benchmarks.faults.outside import SOUND
from benchmarks.faults.table import RUNS

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "faults.jsonl"
ROWS = [(name, verdict.caught) for name, verdict in written(RESULTS).items()]


def test_the_table_has_every_fault() -> None:
    assert sorted(name for name, _ in ROWS) == sorted(FAULTS)


def test_every_fault_finds_the_functions_that_it_replaces() -> None:
    for inject in (inject for faults in RUNS.values() for inject in faults.values()):
        with ExitStack() as stack:
            inject(stack)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "caught"), ROWS, ids=[name for name, _ in ROWS])
def test_what_comes_of_a_fault_is_what_the_table_says(fault: str, caught: str) -> None:
    verdict = play(fault)
    assert verdict.caught == caught, verdict


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("reward model: all labels are swapped, with 50 anchors", "prefers the losers"),
        ("SFT: the end is not trained on", "the end of a turn is not trained on"),
        ("random rewards", "the reward 'math': expected "),
        ("the KL coefficient follows the KL per token", "the KL to the reference policy: expected "),
        ("the penalty follows the KL per completion", "the KL after the update, which the penalty follows: expected "),
        ("an update never stops early", "the epochs of the update, by the KL of epoch 2"),
        ("groups with a mean below 0.5 are replaced", "the groups of dynamic sampling, by their rewards"),
        ("adapters have the scale of rank-stabilised LoRA", "has the scale 16; alpha / rank is 8"),
        ("every epoch has the minibatches of the first", "in 2 minibatches by this epoch's shuffle"),
        ("every iteration has the seed of the first", "the seed of the rollouts"),
        ("the engine draws from streams of another seed", "not those of the seed's random numbers"),
        ("references are those of the next prompt", "the reference of prompt '0+8': expected '8', found '12'"),
        ("problems of an evaluation are partly right", "eval/accuracy by 0 right answers of 20"),
        ("an evaluation samples", "tokens of a held-out answer are not the likeliest"),
        ("an agent's calls have the same random numbers", "not those of the seed's random numbers"),
        ("the verifier accepts answers that contain the reference", "wrong answer '<answer>7 or 8</answer>' for '7'"),
        ("held-out prompts are trained on", "1 of 80 training prompts are held-out prompts too"),
    ],
)
def test_a_fault_is_stopped_by_its_message(fault: str, message: str) -> None:
    verdict = play(fault)
    assert (verdict.caught, message in verdict.message) == ("stopped", True), verdict


def test_sound_pairs_are_left_alone() -> None:
    assert SOUND["reward model, with 50 anchors"](ExitStack()).caught == "silent"
