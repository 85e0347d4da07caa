"""Row filters: trials of reference answers by the grader, and of code tasks by their solutions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

from rlcore.choices import choices
from rlcore.data_contracts.gate.row_rules import RowFilter
from rlcore.tasks.steps.code_tasks import test_suite_filter
from rlcore.tasks.steps.references import references_screen

SCREENS: Mapping[str, Callable[..., AbstractContextManager[RowFilter | None]]] = choices(
    "data.screen", {"none": nullcontext, "references": references_screen, "tests": test_suite_filter}
)
