"""References that grade nobody are refused where they grade: each is tried once, within a bound."""

from __future__ import annotations

import pytest

from rlcore.tasks.steps import references
from rlcore.tasks.steps.references import references_screen, unusable

MIXED = ["17", "proof", "", '{"dataset": "chain_sum", "entry": {}}', "x^2", r"\frac{1}{0}", "proof"]


def test_reasons_are_given_by_place_and_empty_references_and_other_graders_left_alone() -> None:
    with references_screen() as screen:
        found = screen(MIXED)
    assert sorted(found) == [1, 5, 6]
    assert found[1] == found[6] == "no answer can be graded with it: it is not an answer: 'proof'"


def test_a_reference_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr(references, "reference_errors", lambda some: [tried.append(each) or "" for each in some])
    known: dict[str, str] = {}
    for _ in range(3):
        assert unusable(["x+1", "x+1", "y"], known) == {}
    assert tried == ["x+1", "y"]


def test_beyond_the_bound_the_text_alone_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "MAX_TRIED", 1)
    monkeypatch.setattr(references, "reference_errors", lambda some: ["" for _ in some])
    found = unusable(["x+1", "proof", "y"], {})
    assert list(found) == [1]
