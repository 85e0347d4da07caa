"""Nested values by dotted path."""

from __future__ import annotations

import pytest

from rlcore.tasks.store.nested import flatten


@pytest.mark.parametrize(
    ("nested", "flat"),
    [
        ({"a": 1, "b": {"c": 2, "d": {"e": 3}}}, {"a": 1, "b.c": 2, "b.d.e": 3}),
        ({"rewards": [{"weight": 1}, {"weight": 2}]}, {"rewards.0.weight": 1, "rewards.1.weight": 2}),
        ({"rewards": ({"weight": 1}, 5)}, {"rewards.0.weight": 1, "rewards.1": 5}),
        ({"betas": [0.9, 0.95], "none": None}, {"betas": [0.9, 0.95], "none": None}),  # a list of numbers is a value
        ({"a": {"b": {}}, "c": []}, {"a.b": {}, "c": []}),  # what is empty is not lost
        ({}, {}),
    ],
)
def test_a_path_names_each_value(nested: object, flat: dict[str, object]) -> None:
    assert flatten(nested) == flat


def test_a_path_can_begin_somewhere() -> None:
    assert flatten({"seed": 1}, "run") == {"run.seed": 1}
    assert flatten(7, "run") == {"run": 7}
