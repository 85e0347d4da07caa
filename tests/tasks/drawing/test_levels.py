"""Levels of intervals as people write them."""

from __future__ import annotations

import pytest

from rlcore.tasks.drawing.levels import format_level


@pytest.mark.parametrize(
    ("confidence", "text"), [(0.95, "95 %"), (0.9, "90 %"), (0.995, "99.5 %"), (0.99167, "99.17 %")]
)
def test_a_level_has_no_digit_more_than_it_needs(confidence: float, text: str) -> None:
    assert format_level(confidence) == text
