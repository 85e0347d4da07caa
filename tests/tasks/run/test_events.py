"""Events of the pipeline: their names and labels are those of the automations, and inline each is a line in the log."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from rlcore.tasks.run import events
from rlcore.tasks.run.events import emit_findings, emit_snapshot
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.storage import write_json

AUTOMATIONS = Path(__file__).parents[3] / "infra" / "automations.yaml"


def our_triggers() -> list[dict[str, Any]]:
    """Triggers on events of rlcore; the others react to Prefect's own."""
    triggers = [each["trigger"] for each in yaml.safe_load(AUTOMATIONS.read_text(encoding="utf-8"))]
    return [each for each in triggers if any(name.startswith("rlcore.") for name in each["expect"])]


def test_every_automation_has_an_event() -> None:
    names = {value for value in vars(events).values() if isinstance(value, str) and value.startswith("rlcore.")}
    assert {name for trigger in our_triggers() for name in trigger["expect"]} <= names


def test_every_label_that_an_automation_matches_is_one_that_an_event_has() -> None:
    tree = ast.parse(Path(events.__file__).read_text(encoding="utf-8"))
    keys = [key for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys]
    labels = {key.value for key in keys if isinstance(key, ast.Constant)}
    assert {label for trigger in our_triggers() for label in trigger["match"]} <= labels


def snapshot(folder: Path) -> None:
    ref = ArtifactRef(kind="dataset", uri="", sha256="abc", bytes=1, rows=5, contract="preference_pairs/v2")
    config: Any = SimpleNamespace(name="toy", retrain=None)
    emit_snapshot(config, "prepare_preferences", ref)


def stopped(folder: Path) -> None:
    write_json({"findings": [], "stopped": {"text": "stopped after iteration 3"}}, folder / "health.json")
    emit_findings("toy", "grpo", folder)


def drifted(folder: Path) -> None:
    columns = [{"column": "tokens", "level": "warn"}, {"column": "turns", "level": "calm"}]
    write_json([{"name": "prompts", "columns": columns}], folder / "drift.json")
    emit_findings("toy", "drift", folder)


@pytest.mark.parametrize(
    ("happens", "line"),
    [
        (snapshot, "prepare_preferences of toy: rlcore.snapshot.made 5 rows for training and held out (preference_pai"),
        (stopped, "grpo of toy: rlcore.health.stopped stopped after iteration 3"),
        (drifted, "drift of toy: rlcore.drift accepted, but these columns have moved: prompts: tokens"),
    ],
)
def test_inline_an_event_is_one_line_in_the_log(
    happens: Callable[[Path], None], line: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    happens(tmp_path)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(line)


def test_what_is_as_it_should_be_is_no_event(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    emit_findings("toy", "sft", tmp_path)
    write_json({"findings": [], "stopped": None}, tmp_path / "health.json")
    write_json([{"name": "prompts", "columns": [{"column": "turns", "level": "calm"}]}], tmp_path / "drift.json")
    emit_findings("toy", "grpo", tmp_path)
    assert caplog.records == []
