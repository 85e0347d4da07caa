"""Trials of rows before they are accepted: references by the grader, code tasks by their own solutions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

from rlcore.choices import choices
from rlcore.data_contracts.gate.row_rules import Screen
from rlcore.tasks.steps.code_tasks import tests_screen
from rlcore.tasks.steps.references import references_screen

SCREENS: Mapping[str, Callable[[], AbstractContextManager[Screen | None]]] = choices(
    "data.screen", {"none": nullcontext, "references": references_screen, "tests": tests_screen}
)
