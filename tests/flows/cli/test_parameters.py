"""One text with several overrides."""

from __future__ import annotations

import pytest

from rlcore.flows.cli.parameters import split_overrides


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("", ()),
        ("seed=1", ("seed=1",)),
        ("  seed=1   name=x  ", ("seed=1", "name=x")),
        ("data.prompts.path=my rows.jsonl seed=1", ("data.prompts.path=my rows.jsonl", "seed=1")),
        ("a.rewards=[{kind='math', weight=1.0}] seed=1", ("a.rewards=[{kind='math', weight=1.0}]", "seed=1")),
        ("a.options={ x=1, y = 2 }", ("a.options={ x=1, y = 2 }",)),
        ('name="x y=1" seed=1', ('name="x y=1"', "seed=1")),
        (r'name="a \" b=1" seed=1', (r'name="a \" b=1"', "seed=1")),
        ("name='b=] c=1' seed=1", ("name='b=] c=1'", "seed=1")),
        ("name=it's here seed=1", ("name=it's here", "seed=1")),
        ("a=b == c", ("a=b == c",)),
        ("nonsense", ("nonsense",)),
    ],
)
def test_a_blank_parts_two_overrides_where_a_key_follows(text: str, overrides: tuple[str, ...]) -> None:
    assert split_overrides(text) == overrides
