"""Hours and cost of accepted models: each promotion bears all tries since the one before."""

from __future__ import annotations

from datetime import UTC, datetime, tzinfo

import pytest

from rlcore.tasks.pipeline import accepted
from rlcore.tasks.pipeline.accepted import accepted_lines, accepted_presets, per_accepted, tries_of
from rlcore.tasks.store import audit_log
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.audit_log import record_action
from rlcore.tasks.store.cache import Record, StageCache
from rlcore.tasks.store.prices import prices_path
from rlcore.tasks.store.settings import Home

CPU = {"device": "cpu", "gpu": ""}
L4 = {"device": "cuda", "gpu": "NVIDIA L4 (compute capability 8.9)"}


def record(home: Home, stage: str, hour: int, *, hours: float = 1.0, machine: dict[str, str], preset: str) -> None:
    """A result of a stage that a preset needed, made on the first of January."""
    key, cache = f"{stage}-{hour}", StageCache(home.cache)
    made = Record(
        key=key,
        ref=ArtifactRef(kind="x", uri="artifacts/x", sha256="0" * 64, bytes=1),
        ingredients={"machine": machine},
        metrics={},
        code="",
        environment="",
        created=f"2026-01-01T{hour:02d}:00:00.000+00:00",
        seconds=3600.0 * hours,
    )
    cache.write(stage, made)
    cache.note_use(stage, key, preset)


def promote(home: Home, subject: str, hour: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Clock:
            return cls(2026, 1, 1, hour, 30, tzinfo=UTC)

    monkeypatch.setattr(audit_log, "datetime", Clock)
    record_action(home, accepted.PROMOTED, subject, {})


@pytest.fixture
def tried(home: Home, monkeypatch: pytest.MonkeyPatch) -> Home:
    """Two promotions of the preset mine: the first after 1 + 2 hours, the second after 4, then 8 in vain."""
    record(home, "prepare_prompts", 1, machine={}, preset="mine")
    record(home, "grpo", 2, hours=2.0, machine=L4, preset="mine")
    promote(home, "mine-grpo/1", 3, monkeypatch)
    record(home, "grpo", 4, hours=4.0, machine=CPU, preset="mine")
    record(home, "grpo", 5, hours=100.0, machine=CPU, preset="other")
    promote(home, "other-grpo/7", 6, monkeypatch)
    promote(home, "mine-grpo/2", 7, monkeypatch)
    record(home, "grpo", 8, hours=8.0, machine=CPU, preset="mine")
    return home


def test_hours_of_a_model_are_those_since_the_promotion_before(tried: Home) -> None:
    found = [(each.model, each.hours) for each in tries_of(tried, "mine")]
    assert found == [("mine-grpo/1", 3.0), ("mine-grpo/2", 4.0), ("", 8.0)]
    assert accepted_presets(tried) == {"mine", "other"}


def test_a_stage_without_a_model_costs_what_the_machine_after_it_costs(tried: Home) -> None:
    prices_path(tried).write_text('per_hour = {cpu = 1.0, "NVIDIA L4" = 10.0}')
    assert [each.cost for each in tries_of(tried, "mine")] == [30.0, 4.0, 8.0]
    lines = list(accepted_lines(tried, "mine"))
    assert [" ".join(line.split()) for line in lines] == [
        "accepted 3 h, 30 USD mine-grpo/1", "accepted 4 h, 4 USD mine-grpo/2", "since then 8 h, 8 USD",
    ]  # fmt: skip


def test_metrics_are_means_over_the_accepted_models_of_everything_that_was_tried(tried: Home) -> None:
    assert per_accepted(tries_of(tried, "mine")) == {"accepted/models": 2.0, "accepted/hours": 7.5}
    prices_path(tried).write_text('per_hour = {cpu = 1.0, "NVIDIA L4" = 10.0}')
    assert per_accepted(tries_of(tried, "mine"))["accepted/cost"] == 21.0  # (30 + 4 + 8) / 2
    assert per_accepted(()) == {}


def test_without_a_promotion_there_is_nothing_to_show(home: Home) -> None:
    record(home, "grpo", 1, machine=CPU, preset="mine")
    assert list(accepted_lines(home, "mine")) == []
