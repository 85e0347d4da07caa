"""Scheduled runs that did not start before the next one was due."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import FlowRun

from rlcore.tasks.run.reconciliation import missed_runs

NIGHT, NIGHTLY, HOURLY = datetime(2026, 1, 1, 2, tzinfo=UTC), uuid4(), uuid4()


def late(day: int, deployment: UUID = NIGHTLY, **more: Any) -> FlowRun:
    due = NIGHT + timedelta(days=day)
    fields = {"flow_id": uuid4(), "auto_scheduled": True, "expected_start_time": due, "deployment_id": deployment}
    return FlowRun(name=f"day {day}", **(fields | more))


@pytest.mark.parametrize(
    ("runs", "missed"),
    [
        ([], []),
        ([late(1)], []),  # due now, and late for less than a night
        ([late(1), late(2)], ["day 1"]),
        ([late(3), late(1), late(2)], ["day 1", "day 2"]),
        ([late(1), late(2, HOURLY)], []),  # of another schedule
        ([late(1, auto_scheduled=False), late(2)], []),  # somebody queued it
    ],
)
def test_a_run_is_missed_once_a_later_one_of_its_schedule_is_late_too(runs: list[FlowRun], missed: list[str]) -> None:
    assert [each.name for each in missed_runs(runs)] == missed
