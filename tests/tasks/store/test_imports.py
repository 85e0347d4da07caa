"""The imports of a module, of the rows of its tables that are chosen."""

from __future__ import annotations

import pytest

from rlcore.tasks.store.imports import imports_of

SOURCE = """
from typing import TYPE_CHECKING

from rlcore import always
from rlcore.choices import choices
from rlcore.fast import run
from rlcore.slow import walk
from rlcore.types import Prompt

if TYPE_CHECKING:
    from rlcore.hints import Hint


def _careful(prompt: Prompt) -> None:
    from rlcore.care import look
    _check(look(walk(prompt)))


def _check(found: object) -> None:
    import rlcore.check


def public(hint: Hint) -> None:
    always.f(WAYS)


WAYS = choices("way", {"fast": run, "slow": _careful, "free": lambda prompt: None})
"""
FAST, SLOW = {"rlcore.fast", "rlcore.fast.run"}, {"rlcore.slow", "rlcore.slow.walk", "rlcore.care", "rlcore.check"}


@pytest.mark.parametrize(
    ("chosen", "there", "absent"),
    [
        ({"way": frozenset({"fast"})}, FAST, SLOW),
        ({"way": frozenset({"slow"})}, SLOW, FAST),
        ({"way": frozenset({"free"})}, set(), FAST | SLOW),
        ({"way": frozenset()}, set(), FAST | SLOW),
        ({"another": frozenset()}, FAST | SLOW, set()),
        ({}, FAST | SLOW, set()),
    ],
)
def test_of_a_table_the_chosen_rows_count_with_the_private_functions_that_they_use(
    chosen: dict[str, frozenset[str]], there: set[str], absent: set[str]
) -> None:
    found = imports_of(SOURCE, "rlcore.way", chosen)
    assert {"rlcore.always"} | there <= found
    assert not absent & found


def test_names_for_type_checkers_alone_are_not_run() -> None:
    assert "rlcore.hints" not in imports_of(SOURCE, "rlcore.way")


def test_a_table_whose_rows_are_not_written_out_counts_whole() -> None:
    source = SOURCE.replace('choices("way", {', "choices(setting, {")
    assert imports_of(source, "rlcore.way", {"way": frozenset()}) >= FAST | SLOW
