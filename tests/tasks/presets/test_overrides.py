from __future__ import annotations

from typing import Any

import pytest

from rlcore.errors import ConfigError
from rlcore.tasks.presets.overrides import apply_override


def overridden(*overrides: str) -> dict[str, Any]:
    """A small document after overrides."""
    document: dict[str, Any] = {"a": {"b": 1}, "items": [{"kind": "x"}, {"kind": "y"}]}
    for override in overrides:
        apply_override(document, override)
    return document


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("a.b=2", 2),
        ("a.b=2e-6", 2e-6),
        ("a.b=true", True),
        ('a.b="two words"', "two words"),
        ("a.b=data/my.jsonl", "data/my.jsonl"),
        ("a.b=hub:org/name@main", "hub:org/name@main"),
        ("a.b=x=y", "x=y"),
        ("a.b=", ""),
        ("a.b=[1, 2]", [1, 2]),
        (" a.b = 3 ", 3),
    ],
)
def test_an_override_is_read_as_toml_and_else_as_a_bare_word(override: str, value: object) -> None:
    assert overridden(override)["a"]["b"] == value


def test_an_override_reaches_into_lists_by_number_and_makes_missing_sections() -> None:
    document = overridden("items.1.weight=0.5", "new.deep.key=1")
    assert document["items"] == [{"kind": "x"}, {"kind": "y", "weight": 0.5}]
    assert document["new"] == {"deep": {"key": 1}}


def test_later_overrides_win() -> None:
    assert overridden("a.b=2", "a.b=3")["a"]["b"] == 3


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("a.b", "not of the form path.to.key=value"),
        ("=3", "not of the form path.to.key=value"),
        ("a.b.c=3", "'b' is a value, not a section"),
        ("items.7.kind=x", "'7' is not a number below 2"),
        ("items.first.kind=x", "'first' is not a number below 2"),
        ("items.0=x", "name an item of the list by its number, then its key"),
    ],
)
def test_a_wrong_override_is_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        overridden(override)
