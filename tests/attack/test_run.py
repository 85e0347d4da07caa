"""The table of attacks: it names tests that exist, the page has its rows, and a failure is counted as what it is."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.attack.run import HEAD, PAGE, ROOT, ROWS, Case, Row, line, tally, with_table

ROW = Row(attacks="a thing", hostile=("a::bad",), sound=("a::good",))
FOUND = (
    Case(test="a::bad", passed=True, seconds=1.0, counts={}, is_fast=True),
    Case(test="a::bad", passed=True, seconds=2.0, counts={"hostile": 5, "sound": 7}, is_fast=True),
    Case(test="a::good", passed=True, seconds=1.0, counts={}, is_fast=True),
    Case(test="another::test", passed=False, seconds=9.0, counts={}, is_fast=False),
)


@cache
def functions(path: Path) -> frozenset[str]:
    return frozenset(node.name for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("test", [test for row in ROWS for test in (*row.hostile, *row.sound)])
def test_every_test_of_the_table_exists(test: str) -> None:
    file, _, name = test.partition("::")
    assert name in functions(ROOT / file)


def test_the_page_has_a_row_for_each_and_every_attack_that_ran_was_caught() -> None:
    _, _, rest = PAGE.read_text("utf-8").partition(HEAD)
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in rest.partition("\n\n")[0].splitlines()[2:]]
    assert [row[0] for row in rows] == [row.attacks for row in ROWS]
    ran = [row for row in rows if row[1] != "not run here"]
    assert [row for row in ran if row[1] != row[2] or row[4] != "0"] == []
    assert len(ran) > len(rows) / 2


def test_cases_are_counted_as_many_as_they_say_they_are() -> None:
    assert line(ROW, tally(ROW, FOUND)) == "| a thing | 6 | 6 | 8 | 0 | 4 | yes |"


@pytest.mark.parametrize(
    ("place", "told"),
    [(0, "| a thing | 6 | 5 | 8 | 0 | 4 | yes |"), (2, "| a thing | 6 | 6 | 8 | 1 | 4 | yes |")],
)
def test_a_failed_attack_was_not_caught_and_failed_sound_input_is_a_false_alarm(place: int, told: str) -> None:
    failed = Case(test=FOUND[place].test, passed=False, seconds=1.0, counts={}, is_fast=True)
    found = tally(ROW, [*FOUND[:place], failed, *FOUND[place + 1 :]])
    assert found is not None
    assert not found.is_good
    assert line(ROW, found) == told


def test_a_row_whose_test_did_not_run_says_so() -> None:
    assert line(ROW, tally(ROW, FOUND[2:])) == "| a thing | not run here | | | | | |"


def test_the_table_takes_the_place_of_the_one_before_and_of_nothing_else() -> None:
    page = f"before\n\n{HEAD}\n|---|\n| old |\n\nafter\n\nend\n"
    assert with_table(page, [HEAD, "|---|", "| new |"]) == f"before\n\n{HEAD}\n|---|\n| new |\n\nafter\n\nend\n"
