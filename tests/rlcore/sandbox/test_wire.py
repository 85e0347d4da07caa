"""The wire of program answers, tests of a task, equal outputs, and right programs of the page."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.sandbox.base import ResourceLimits, RunStatus
from rlcore.sandbox.pool import Job, SandboxPool
from rlcore.sandbox.suite import Suite, best_constant, guess_rate, parse_suite, same_text, same_value, shown
from rlcore.sandbox.wire import MAX_DEPTH, MAX_FRAME_BYTES, WireError, decode, encode
from tests.quick import within_seconds
from tests.waiting import LONG

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    | st.characters(categories=["Cs"])
)  # fmt: skip

HASHABLE = st.recursive(SCALARS, lambda inner: st.tuples(inner, inner), max_leaves=4)

DATA = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.tuples(inner) | st.sets(HASHABLE) | st.dictionaries(HASHABLE, inner),
    max_leaves=20,
)


@settings(max_examples=50, deadline=None)
@given(DATA)
def test_plain_data_comes_back_as_it_was(value: Any) -> None:
    back = decode(encode(value))
    assert back == value
    assert repr(back) == repr(value) or isinstance(value, set | dict | list | tuple)


def test_the_format_is_what_the_docstring_says() -> None:
    assert encode([1, 2]) == b"l2:i1,i2,"
    assert encode({"a": (True, None)}) == b"d1:s1:au2:TN"
    assert encode(-255) == b"i-ff,"


def test_nan_and_long_integers_stay_themselves() -> None:
    assert math.isnan(decode(encode(math.nan)))
    assert decode(encode(10**5000)) == 10**5000


def test_a_subclass_is_sent_as_its_plain_type_whatever_it_claims() -> None:
    class Liar(list[int]):
        def __iter__(self) -> Any:
            return iter([9])

        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    assert type(decode(encode(Liar([1])))) is list
    assert decode(encode(Counter("aab"))) == {"a": 2, "b": 1}
    assert type(decode(encode(OrderedDict(a=1)))) is dict


@pytest.mark.parametrize(
    "value", [object(), len, 1j, range(3), iter([]), int, {1: object()}, [lambda: 0], set(range(2_001))]
)
def test_what_is_no_plain_data_is_refused(value: Any) -> None:
    with pytest.raises(WireError):
        encode(value)


def test_depth_has_a_bound_on_both_sides() -> None:
    nested: Any = []
    for _ in range(MAX_DEPTH - 1):
        nested = [nested]
    assert decode(encode(nested)) == nested
    with pytest.raises(WireError):
        encode([[nested]])
    with pytest.raises(WireError):
        decode(b"l1:" * 60 + b"N")
    with pytest.raises(WireError):
        decode(b"l1:" * 100_000)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"X", b"i", b"i,", b"iZ,", b"i1", b"f,", b"s5:abc", b"s-1:", b"l9:N", b"l99999999:N", b"NN", b"s:",
        b"s1:\xff", b"d1:l0:N", b"t1:l0:", b"t1:d0:", b"t2001:" + b"N" * 2001, b"l1:", b"s99999999999999999999:x",
        b"i" + b" 1,", b"u1:" * 46 + b"N",
    ],
)  # fmt: skip
def test_malformed_bytes_are_refused(data: bytes) -> None:
    if data == b"i 1,":  # what int() forgives is harmless
        assert decode(data) == 1
        return
    with pytest.raises(WireError):
        decode(data)


@given(st.binary(max_size=60))
def test_any_bytes_are_data_or_refused(data: bytes) -> None:
    try:
        value = decode(data)
    except WireError:
        return
    encode(value)


def test_a_reader_looks_at_the_clock_while_it_reads() -> None:
    looks: list[int] = []
    for value in (list(range(5_000)), [[1]] * 5_000, [[[]]]):
        looks.clear()
        assert decode(encode(value), lambda: looks.append(1)) == value
        assert len(looks) >= len(value) // 1_024 + 1

    def late() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        decode(encode([1]), late)


def test_a_text_larger_than_a_frame_is_refused() -> None:
    with pytest.raises(WireError):
        encode("x" * (MAX_FRAME_BYTES + 1))


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


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("1 2\n", "1 2", True), ("1 2", "1 2  \n\n", True), ("a\nb", "a \nb\n", True), ("1", "1\n2", False),
        ("1 2", "1  2", True), ("1 2", " 1 2", True), ("a\tb", "a b", False), ("  *\n ***", "*\n***", False),
        (" 1", "1", False), ("1 2", "1\n2", False), ("1\n2", "1\n\n2", False), ("", "\n", True), ("", "0", False),
        ("1", "1.0", True), ("1", "1.0000001", False), ("1", "0.9999999", False), ("1e3", "1000", True),
        ("1000", "1E+3", True), ("9007199254740993", "9007199254740992.0", False), ("0.0", "-0.0", True),
        ("0", "-0", True), ("0.5", "1/2", False), ("0.5", ".5", True), ("0.333333", "0.3333333333333333", True),
        ("0.3333333333", "0.333", False), ("2500000.0", "2500001.0", True), ("2500000.0", "2500010.0", False),
        ("0.001", "0.0010000001", True), ("007", "7", False), ("0101", "101", False), ("+7", "7", False),
        ("7", "\u0667", False), ("1e400", "1e401", False), ("1e99999", "1e99999", True), ("nan", "nan", True),
        ("inf", "1e999", False), ("x = 0.1000000000", "x = 0.1", True), ("YES", "Yes", False),
        ("1" * 5_000, "1" * 5_000, True), ("1" * 5_000, "1" * 4_999 + "2", False),
    ],
)  # fmt: skip
def test_outputs_are_equal_in_their_words_and_in_the_value_of_their_numbers(
    expected: str, printed: str, same: bool
) -> None:
    assert same_text(expected, printed) is same


@pytest.mark.parametrize(
    ("expected", "value", "same"),
    [
        (1, 1, True), (1, 1.0, True), (1, True, False), (True, 1, False), (True, True, True), (0, False, False),
        (0, None, False), (None, None, True), ([1, [2]], (1, (2,)), True), ([1], {1}, False), ([1], [1, 1], False),
        ([True], [1], False), ({"a": [1]}, {"a": (1,)}, True), ({"a": 1}, {"a": True}, False),
        ({"a": 1}, {"a": 1, "b": 2}, False), ({"1": 1}, {1: 1}, True), ({"1": 1}, {1: 1, "1": 1}, False),
        ({"1": 1, "2": 1}, {1: 1}, False), ({"true": 1}, {True: 1}, True), ({"null": 1}, {None: 1}, True),
        ({"1.5": 1}, {1.5: 1}, True), ({"(1, 2)": 1}, {(1, 2): 1}, False), (0.3, 0.1 + 0.2, True), (0.3, 0.31, False),
        ([0.1, [0.2]], (0.1 + 1e-12, [0.2]), True), (3.0, 3, True), (3, 3.0000001, False), (3, 3.0, True),
        (10**400, 1e308, False), (0.5, 10**400, False), ([10**5000], [10**5000], True), (math.nan, math.nan, True),
        (math.inf, math.inf, True), (math.inf, 1e308, False), ([1, 2], {1, 2}, False), ("a", b"a", False),
        ("1", 1, False), (1.5, math.nan, False),
    ],
)  # fmt: skip
def test_values_are_equal_as_json_has_them(expected: Any, value: Any, same: bool) -> None:
    assert same_value(expected, value) is same


def test_a_task_may_set_its_own_tolerance() -> None:
    assert same_text("3.14", "3.1415", 0.01)
    assert not same_text("3.14", "3.1400001", 0.0)
    assert same_text("100", "100.4", 0.01)  # a tolerance of the task holds for integers too
    assert same_value([1.0], [1.05], 0.1)
    assert not same_value(0.3, 0.1 + 0.2, 0.0)


@pytest.mark.parametrize("value", [[10**6_000], "x" * 10_000, list(range(10**5)), {"a": ["b" * 999]}, None])
def test_a_value_is_shown_in_a_few_words(value: Any) -> None:
    assert len(shown(value)) < 500


def test_comparing_much_output_is_quick() -> None:
    numbers = "".join(f"{n / 7:.9f} {n}\n" for n in range(50_000))
    other = "".join(f"{n / 7:.7f}  {n}\n" for n in range(50_000))
    with within_seconds():
        assert same_text(numbers, other)
        assert not same_text("1 " * 300_000, "1" * 600_000)
        assert not same_text("\t" * 300_000, " " * 300_000 + "x")


PAGE = Path(__file__).parents[3] / "docs" / "recipes.md"

TITLE = "### Right programs that count as wrong"

PATIENT = ResourceLimits(wall_seconds=LONG)

ONE = "def f(x):\n    "

# By the first words of the row: programs of a function f, or scripts, that would answer 1 to an input of 1.
FUNCTIONS: dict[str, tuple[str, ...]] = {
    "ends itself with `exit()`": tuple(
        f"def f(x): return x\nif __name__ == '__main__':\n    {end}"
        for end in ("exit()", "quit()", "import sys\n    sys.exit(0)")
    ),
    "reads its input below": ("def f(x): return x\nif __name__ == '__main__':\n    print(f(int(input())))",),
    "has its function in": (
        "class Solution:\n    def f(self, x: List[int]): return x",
        f"{ONE}return min(deque([x]).popleft(), inf)",
    ),
    "`asyncio.run`": (
        f"import asyncio\nasync def g(x): return x\n{ONE}return asyncio.run(g(x))",
        f"import multiprocessing as m\n{ONE}with m.Pool(1) as pool: return pool.map(int, [x])[0]",
        f"import subprocess as s\n{ONE}return int(s.run(['echo', str(x)], capture_output=True).stdout)",
    ),
    "returns a `Fraction`": (
        f"from fractions import Fraction\n{ONE}return Fraction(x)",
        f"from decimal import Decimal\n{ONE}return Decimal(x)",
        f"{ONE}yield x",
        f"class A:\n    def __eq__(self, other): return True\n{ONE}return A()",
    ),
    "returns a set or dict": (f"{ONE}return set(range(2_001))", f"{ONE}return 'x' * (1 << 20)"),
    "changes its argument": ("x = 0\ndef f(y):\n    global x\n    x = y",),
    "needs a stack": (f"{ONE}return len(bytearray(1 << 30)) and x",),
    "uses numpy": (f"{ONE}import numpy\n    return int(numpy.int64(x))",),
    "writes a file": (f"{ONE}open('/tmp/x', 'w').write(str(x))\n    return x",),
}

LISTS: dict[str, tuple[str, ...]] = {  # of a function f of a list, that would answer it
    "returns a deque": (
        f"from collections import deque\n{ONE}return deque(x)",
        f"{ONE}return dict.fromkeys(x).keys()",
        f"{ONE}return range(x[0], x[-1] + 1)",
    ),
    "returns a set where": (f"{ONE}return set(x)", f"{ONE}return frozenset(x)"),
}

SCRIPTS: dict[str, tuple[str, ...]] = {
    "ends itself with `exit()`": (
        "print(input())\nexit()",
        "print(input())\nquit()",
        "import sys\nprint(input())\nsys.exit(0)",
    ),
    "ends itself with `os._exit()`": ("import os\nprint(input(), flush=True)\nos._exit(0)",),
    "prints more than": ("print(input())\nprint(' ' * (1 << 18))",),
    "prints words of another": ("input('n: ')\nprint(1)", "print()\nprint(input())"),
    "writes a file": ("print(open('/dev/stdin').read())", "print(1, file=open('x', 'w'))"),
    "reads `open(0)`": (
        "print(open(0).read(), end='')",
        "import os\nprint(os.read(0, 9).decode(), end='')",
        "import sys\nprint(open(sys.stdin.fileno()).read(), end='')",
    ),
}


def documented() -> dict[str, str]:
    """The page's table: a program to what was decided."""
    lines = PAGE.read_text("utf-8").partition(TITLE)[2].partition("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {row[0]: row[1] for row in rows[1:]}


def decided(words: str) -> bool:
    (decision,) = [said for program, said in documented().items() if program.startswith(words)]
    assert decision.startswith(("runs", "wrong"))
    return decision.startswith("runs")


def test_each_row_of_the_page_has_a_program_and_each_program_a_row() -> None:
    told = [
        words for program in documented() for words in {**FUNCTIONS, **LISTS, **SCRIPTS} if program.startswith(words)
    ]
    assert sorted(told) == sorted({**FUNCTIONS, **LISTS, **SCRIPTS})
    assert len(told) == len(documented())


JUDGED = {
    "function": (FUNCTIONS, {"style": "call", "entry_point": "f", "tests": [{"args": [1], "output": 1}]}),
    "function of lists": (
        LISTS,
        {"style": "call", "entry_point": "f", "tests": [{"args": [[3, 4]], "output": [3, 4]}]},
    ),
    "script": (SCRIPTS, {"style": "stdin", "tests": [{"input": "1\n", "output": "1\n"}]}),
}


@pytest.mark.parametrize(
    ("kind", "words", "code"),
    [
        (kind, words, code)
        for kind, (programs, _) in JUDGED.items()
        for words, codes in programs.items()
        for code in codes
    ],
)
def test_a_program_is_judged_as_the_page_says(sandbox: SandboxPool, kind: str, words: str, code: str) -> None:
    (outcome,) = sandbox.check(Job(reference=json.dumps(JUDGED[kind][1]), code=code, limits=PATIENT))
    assert (outcome.status is RunStatus.PASS) is decided(words), outcome
    assert outcome.status is not RunStatus.INFRA
