"""References are read strictly."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from typing import Any

import pytest

from rlcore.sandbox.suite import Suite, best_constant, guess_rate, parse_suite

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
        ({"tests": []}, "non-empty"),
        ({"tests": {}}, "non-empty"),
        ({"tests": [{"args": [1], "output": 2}, {"args": [1]}]}, "tests.1 is not a test of style call"),
        ({"tests": ["assert f()"]}, "tests.0 is not a test of style call"),
        ({"style": "assert"}, "tests.0 is not a test of style assert"),
        ({"style": "stdin"}, "tests.0 is not a test of style stdin"),
        ({"extra": 1}, "an object with checker, entry_point"),
        ({"tolerance": -1}, "tolerance must be"),
        ({"tolerance": True}, "tolerance must be"),
        ({"tolerance": math.nan}, "tolerance must be"),
        ({"checker": 1}, "must be texts"),
        ({"style": "assert", "tests": ["assert f(1)"], "checker": "x"}, "take no checker"),
    ],
)
def test_a_malformed_reference_is_refused_with_the_reason(change: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        parse_suite(json.dumps(CALL | change))


def test_integers_of_any_length_are_read() -> None:
    digits = "7" * 9_000
    suite = parse_suite(json.dumps(CALL).replace("2}", digits + "}"))
    assert suite.tests[0]["output"] == int(Decimal(digits))
    assert best_constant(suite) == 1


def yes_no(answers: list[Any]) -> Suite:
    return parse_suite(json.dumps(CALL | {"tests": [{"args": [n], "output": one} for n, one in enumerate(answers)]}))


def test_answers_that_can_be_guessed_by_their_order_are_few_and_short() -> None:
    assert guess_rate(yes_no([True, False, True, True])) == 0.75
    assert guess_rate(yes_no([0, 1, -1])) == 1 / 3
    assert guess_rate(yes_no([True, True])) == 0.0  # one constant: no order
    assert guess_rate(yes_no([2, 2, 3, 2])) == 0.75
    assert guess_rate(yes_no([27, 3, -6])) == 0.0  # whoever knows them has solved it
    assert guess_rate(yes_no([1, 2, 3, 4])) == 0.0
    assert guess_rate(yes_no(["a long answer", "another one"])) == 0.0
