"""References are read strictly, and outputs compared as a judge would."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from rlcore.sandbox.suite import parse_suite, same_text, same_value

CALL = {"style": "call", "entry_point": "f", "tests": [{"args": [1], "output": 2}]}


def test_a_reference_becomes_a_suite_and_its_prelude_stands_in_front() -> None:
    suite = parse_suite(json.dumps({**CALL, "prelude": "import math"}))
    assert (suite.style, suite.entry_point, len(suite.tests)) == ("call", "f", 1)
    assert suite.program("x = 1") == "import math\nx = 1"
    assert parse_suite(json.dumps(CALL)).program("x = 1") == "x = 1"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"style": "junit"}, "style must be one of stdin, call, assert"),
        ({"entry_point": "f()"}, "name of a function"),
        ({"prelude": 3}, "must be texts"),
        ({"tests": []}, "not empty"),
        ({"tests": {}}, "not empty"),
        ({"tests": [{"args": [1], "output": 2}, {"args": [1]}]}, "tests.1 is no call test"),
        ({"tests": ["assert f()"]}, "tests.0 is no call test"),
        ({"style": "assert"}, "tests.0 is no assert test"),
        ({"style": "stdin"}, "tests.0 is no stdin test"),
        ({"extra": 1}, "an object with entry_point"),
    ],
)
def test_a_malformed_reference_is_refused_with_the_reason(change: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        parse_suite(json.dumps(CALL | change))


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("1 2\n", "1 2", True),
        ("1 2", "1 2  \n\n", True),
        ("a\nb", "a \nb\n", True),
        ("1", "1\n2", False),
        ("1 2", "1  2", False),
        (" 1", "1", False),
        ("", "\n", True),
        ("", "0", False),
        ("1", "1.0", False),
    ],
)
def test_outputs_are_equal_but_for_blanks_at_ends(expected: str, printed: str, same: bool) -> None:
    assert same_text(expected, printed) is same


@pytest.mark.parametrize(
    ("expected", "value", "same"),
    [
        (1, 1, True),
        (1, 1.0, True),
        (1, True, False),
        (True, 1, False),
        (True, True, True),
        (0, False, False),
        (0, None, False),
        (None, None, True),
        ([1, [2]], (1, (2,)), True),
        ([1], {1}, False),
        ([1], [1, 1], False),
        ([True], [1], False),
        ({"a": [1]}, {"a": (1,)}, True),
        ({"a": 1}, {"a": True}, False),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({"1": 1}, {1: 1}, False),
        ("1", 1, False),
        (1.5, math.nan, False),
    ],
)
def test_values_are_equal_as_json_has_them(expected: Any, value: Any, same: bool) -> None:
    assert same_value(expected, value) is same
