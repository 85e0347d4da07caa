"""Events of the pipeline and the automations of the Prefect server name the same events and labels."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import yaml

from rlcore.tasks.pipeline import events

AUTOMATIONS = Path(__file__).parents[3] / "infra" / "automations.yaml"


def our_triggers() -> list[dict[str, Any]]:
    """Triggers on events of rlcore; the others react to Prefect's own."""
    triggers = [each["trigger"] for each in yaml.safe_load(AUTOMATIONS.read_text(encoding="utf-8"))]
    return [each for each in triggers if any(name.startswith("rlcore.") for name in each["expect"])]


def source() -> ast.Module:
    return ast.parse(Path(events.__file__).read_text(encoding="utf-8"))


def test_every_emitted_event_has_an_automation_and_every_automation_has_an_event() -> None:
    calls = [node for node in ast.walk(source()) if isinstance(node, ast.Call)]
    names = [ast.unparse(call.args[0]) for call in calls if ast.unparse(call.func).endswith("emit_event")]
    emitted = {getattr(events, name) for name in names}
    assert emitted == {name for trigger in our_triggers() for name in trigger["expect"]}


def test_every_label_that_an_automation_matches_is_one_that_an_event_has() -> None:
    keys = [key for node in ast.walk(source()) if isinstance(node, ast.Dict) for key in node.keys]
    labels = {key.value for key in keys if isinstance(key, ast.Constant)}
    assert {label for trigger in our_triggers() for label in trigger["match"]} <= labels
