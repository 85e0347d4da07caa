"""Faulty inputs, one of each family in the fast tests; ``python -m tests.attack.bad_data.run`` runs them all."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.attack.bad_data.case import Case
from tests.attack.bad_data.run import all_cases, attack, faults

CASES = all_cases()


def some() -> list[Case]:
    """Return the first cases of each family, and one from its middle."""
    by_family: dict[str, list[Case]] = {}
    for case in CASES:
        by_family.setdefault(case.family, []).append(case)
    return [one for cases in by_family.values() for one in (cases[0], cases[len(cases) // 2])]


def test_there_are_enough_cases_and_no_two_are_one() -> None:
    names = Counter((case.family, case.name) for case in CASES)
    assert len(names) == len(CASES) >= 400


@pytest.mark.parametrize("case", some(), ids=lambda case: f"{case.family}: {case.name}")
def test_an_input_of_each_family_is_taken_set_aside_or_refused_as_it_should_be(case: Case, tmp_path: Path) -> None:
    assert list(faults(case, attack(case, tmp_path))) == []


@pytest.mark.slow
def test_no_faulty_input_is_taken_in_silence_and_no_sound_one_is_refused(tmp_path: Path) -> None:
    wrong = []
    for number, case in enumerate(CASES):
        folder = tmp_path / str(number)
        folder.mkdir()
        wrong += faults(case, attack(case, folder))
    assert wrong == []
