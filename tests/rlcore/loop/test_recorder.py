from __future__ import annotations

import logging

import pytest

from rlcore.checks.health import HealthFinding
from rlcore.loop import HealthStop, LogRecorder, summary_line

METRICS = {"reward/mean": 0.5123, "completion/length": 18.04}
FINDING = HealthFinding(
    rule="kl", metric="kl/ref", level="stop", since=5, value=0.75, limit=0.5, fix="lower the learning rate"
)
STOP = HealthStop(finding=FINDING, iteration=9, restored_iteration=4)


def test_an_iteration_is_a_line_with_what_it_has() -> None:
    assert summary_line(3, 10, METRICS) == "iteration 3/10 reward=0.512 length=18.0"
    more = METRICS | {"eval/accuracy": 0.4, "kl/ref": 0.01, "loss/policy": 7.0}
    assert summary_line(3, 10, more) == "iteration 3/10 reward=0.512 length=18.0 kl=0.0100 eval_accuracy=0.400"


def test_the_log_gets_notes_and_lines_and_a_stop_as_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    recorder = LogRecorder(2)
    with caplog.at_level(logging.INFO, logger="rlcore"):
        recorder.log("engine and learner agree, 100 %")
        recorder.metrics(1, METRICS)
        recorder.flush()
        recorder.stopped(STOP)
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.INFO, logging.INFO, logging.WARNING]
    notes = [record.getMessage() for record in caplog.records]
    assert notes[:2] == ["engine and learner agree, 100 %", "iteration 1/2 reward=0.512 length=18.0"]


def test_a_stop_says_after_which_iteration_why_which_is_kept_and_what_to_do() -> None:
    assert str(STOP) == (
        "stopped after iteration 9: kl: kl/ref=0.75 limit=0.5 since iteration 5; the result is iteration 4."
        " lower the learning rate"
    )
