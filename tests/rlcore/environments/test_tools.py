"""Tools of the table: calculator, search, Python and a read-only database."""

from __future__ import annotations

import math
import resource
import sqlite3
import tempfile
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.config import EpisodeConfig
from rlcore.environments.base import CallError, ToolFailure, ToolOutput
from rlcore.environments.calculator import MAX_BITS, CalculatorTool, calculate, write_number
from rlcore.environments.python import PythonTool
from rlcore.environments.read_only_sql import MORE, ReadOnlyDatabase, SqlLimits
from rlcore.environments.search import Passage, SearchTool
from rlcore.environments.table import ToolResources, build_tools
from rlcore.errors import ConfigError, DataError
from rlcore.sandbox.base import DEFAULT_LIMITS, ResourceLimits, RunResult, RunStatus
from rlcore.sandbox.pool import SandboxPool
from tests.quick import within_seconds
from tests.rlcore.sandbox.conftest import require_bubblewrap
from tests.rows import cases
from tests.waiting import LONG


def answer(expression: str) -> str:
    (output,) = CalculatorTool()([expression])
    assert isinstance(output, ToolOutput)
    assert output.is_error == output.text.startswith("error: ")
    return output.text


@pytest.mark.parametrize(("expression", "expected"), cases(__file__, "arithmetic_is_exact"))
def test_arithmetic_is_exact(expression: str, expected: str) -> None:
    assert answer(expression) == expected


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "an expression is made of"), ("1/0", "division by zero"), ("0**-1", "division by zero"),
        ("5%0", "division by zero"), ("3+", "no whole expression"), ("(" * 99 + "1" + ")" * 99, None),
        ("()", "an expression is made of"), ("...", "Invalid literal"), ("1 2", "no whole expression"),
        ("007", "no whole expression"), ("9**9**9", "an exponent is"), ("99**2000", "too large"),
        ("(2**2000)*(2**2000)", "too large"), ("2**0.5", "an exponent is"), ("1" * 201, "at most 200"),
        ("__import__('os')", "an expression is made of"), ("abs(1)", "an expression is made of"),
        ("1e9", "an expression is made of"), ("٣+٤", "an expression is made of"),
        ("3+4\n+1", "an expression is made of"), ("True", "an expression is made of"),
    ],
)  # fmt: skip
def test_what_is_no_arithmetic_is_an_error_for_the_policy(expression: str, message: str | None) -> None:
    if message is None:
        assert answer(expression) == "1"
    else:
        assert message in answer(expression)
        assert answer(expression).startswith("error: ")


@given(st.text(alphabet="0123456789.+-*/%() ", max_size=210))
def test_any_text_has_a_short_answer(expression: str) -> None:
    assert 0 < len(answer(expression)) <= MAX_BITS


@given(a=st.integers(0, 10**9), b=st.integers(0, 10**9), c=st.integers(1, 10**6))
def test_values_are_those_of_rational_arithmetic(a: int, b: int, c: int) -> None:
    assert calculate(f"({a}-{b})*{b}/{c}+{a}") == Fraction((a - b) * b, c) + a


@given(st.fractions())
def test_a_number_is_written_so_that_it_reads_back(value: Fraction) -> None:
    assert Fraction(write_number(value)) == value


TEXTS = ("the cat sat", "the dog ran far away", "a cat and a cat")


def tool(*texts: str, num_passages: int = 3) -> SearchTool:
    return SearchTool(
        [Passage(passage_id=f"p{i}", text=text) for i, text in enumerate(texts)], num_passages=num_passages
    )


def test_scores_are_those_of_the_formula() -> None:
    # "cat" stands in 2 of 3 passages: idf = ln(1 + 1.5 / 2.5) = 0.4700. Lengths 3, 5, 5, mean 13/3.
    # p0: f = 1, norm = 1.2 * (0.25 + 0.75 * 3 / 4.3333) = 0.92308, 1 * 2.2 / 1.92308 = 1.1440 -> 0.53769
    # p2: f = 2, norm = 1.2 * (0.25 + 0.75 * 5 / 4.3333) = 1.33846, 2 * 2.2 / 3.33846 = 1.31797 -> 0.61945
    ranked = tool(*TEXTS).rank("Cat?")
    assert [passage.passage_id for passage, _ in ranked] == ["p2", "p0"]
    assert [score for _, score in ranked] == pytest.approx([0.61945, 0.53769], abs=1e-4)
    assert math.log(1.6) == pytest.approx(0.4700, abs=1e-4)


def test_the_answer_names_each_passage_on_a_line() -> None:
    answers = tool("one\n two", "two three", num_passages=1)(["TWO", "three", "four", " ?! "])
    assert answers == [
        ToolOutput(text="[p0] one two"),
        ToolOutput(text="[p1] two three"),
        ToolOutput(text="nothing found"),
        ToolOutput(text="error: a query needs a word", is_error=True),
    ]


def test_an_empty_corpus_is_refused() -> None:
    with pytest.raises(DataError, match="no passage"):
        tool()


@given(
    texts=st.lists(st.text(alphabet="ab c", min_size=1), min_size=1, max_size=8),
    query=st.text(alphabet="ab c"),
    count=st.integers(1, 4),
)
def test_the_best_come_first_and_equals_in_the_order_of_the_corpus(texts: list[str], query: str, count: int) -> None:
    ranked = tool(*texts, num_passages=count).rank(query)
    assert len(ranked) <= count
    assert ranked == sorted(ranked, key=lambda item: (-item[1], int(item[0].passage_id[1:])))
    assert all(score > 0.0 for _, score in ranked)
    everything = tool(*texts, num_passages=99).rank(query)
    assert everything[: len(ranked)] == ranked


@pytest.fixture(scope="module")
def boxes() -> Iterator[SandboxPool]:
    require_bubblewrap()
    with SandboxPool() as sandbox:
        yield sandbox


@pytest.fixture
def tool_of_python(boxes: SandboxPool) -> PythonTool:
    return PythonTool(boxes, timeout_seconds=LONG)


def test_programs_are_answered_in_order_with_what_they_print(tool_of_python: PythonTool) -> None:
    programs = ["print(347 * 286)", "x = 1", "print('a')\nprint('b')", "print(x)", "1/0", "print("]
    outputs = [output for output in tool_of_python(programs) if isinstance(output, ToolOutput)]
    assert [output.text for output in outputs[:3]] == ["99242", "nothing was printed", "a\nb"]
    errors = ["NameError", "ZeroDivisionError", "SyntaxError"]  # nothing is kept of the second program
    assert all(name in output.text for name, output in zip(errors, outputs[3:], strict=True))
    assert [output.is_error for output in outputs] == [False] * 3 + [True] * 3


def test_an_error_with_half_a_surrogate_pair_is_escaped(tool_of_python: PythonTool) -> None:
    (output,) = tool_of_python(["raise ValueError(chr(0xd800))"])
    assert isinstance(output, ToolOutput)
    assert output.text.encode().decode().count("ud800") == 1


def test_a_program_that_does_not_end_and_one_that_ends_itself_are_errors_of_the_policy(boxes: SandboxPool) -> None:
    endless, gone = PythonTool(boxes, timeout_seconds=0.7)(["while True: pass", "import os; os._exit(0)"])
    assert endless == ToolOutput(text="error: the program's time was up", is_error=True)
    assert isinstance(gone, ToolOutput)
    assert gone.is_error


class Broken:
    """A sandbox whose boxes do not start."""

    def run(self, code: str, *, stdin: str = "", limits: ResourceLimits = DEFAULT_LIMITS) -> RunResult:
        return RunResult(status=RunStatus.INFRA, error="no box")

    def close(self) -> None:
        return


def test_a_sandbox_that_does_not_start_is_no_error_of_the_policy() -> None:
    assert PythonTool(Broken(), timeout_seconds=1.0)(["print(1)"]) == [ToolFailure(reason="no box")]


def test_the_table_gives_the_tool_its_sandbox() -> None:
    config = EpisodeConfig(tools=("python", "calculator"))
    assert [each.name for each in build_tools(config, ToolResources(sandbox=Broken()))] == ["python", "calculator"]
    with pytest.raises(ConfigError, match="needs a sandbox"):
        build_tools(config, ToolResources())


ROWS = [(number, number % 7, f"name {number}") for number in range(40)]


@pytest.fixture
def database() -> Iterator[ReadOnlyDatabase]:
    found = ReadOnlyDatabase({"stock": (("id", "price", "name"), ROWS)})
    yield found
    assert found.answer("SELECT count(*), sum(price) FROM stock") == f"40 | {sum(row[1] for row in ROWS)}"  # as it was
    found.close()


@pytest.mark.parametrize(
    ("query", "answer"),
    [
        ("SELECT price FROM stock WHERE id=8", "1"),
        ("select name, price from stock where id in (1, 2) order by id desc;", "name 2 | 2\nname 1 | 1"),
        ("SELECT price FROM stock WHERE id=99", "no rows"),
        ("SELECT NULL, 1.5, x'00ff'", "NULL | 1.5 | 00ff"),
        ("SELECT name FROM sqlite_master", "stock"),
        ("SELECT count(*) FROM (SELECT DISTINCT price FROM stock)", "7"),
        ("SELECT a.id FROM stock a JOIN stock b ON a.id = b.id + 1 WHERE b.name LIKE '%38'", "39"),
        ("WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM c WHERE x<5) SELECT sum(x) FROM c", "15"),
    ],
)
def test_a_query_gives_its_rows_one_a_line(database: ReadOnlyDatabase, query: str, answer: str) -> None:
    assert database.answer(query) == answer
    assert database.answer(query) == answer


def test_no_more_rows_are_shown_than_the_limit_and_their_number_is_named(database: ReadOnlyDatabase) -> None:
    assert database.answer("SELECT id FROM stock").splitlines() == [*map(str, range(20)), MORE]
    endless = "WITH RECURSIVE c(x) AS (SELECT 0 UNION ALL SELECT x+1 FROM c) SELECT x FROM c"
    assert database.answer(endless).splitlines() == [*map(str, range(20)), MORE]
    few = ReadOnlyDatabase({"stock": (("id",), [(1,), (2,)])}, SqlLimits(rows=2))
    assert few.answer("SELECT id FROM stock") == "1\n2"


# In seven subqueries each of which names the one before it twice, SQLite compiles the first one 64 times; in forty of
# them it would take more memory than there is, before it has made a single step.
NESTED = "WITH a0 AS (SELECT 1)" + "".join(f", a{n} AS (SELECT 1 FROM a{n - 1}, a{n - 1})" for n in range(1, 8))

WIDE = "WITH a AS (SELECT 1 FROM " + ",".join(["stock"] * 9) + "), b AS (SELECT 1 FROM " + ",".join(["a"] * 60)

ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM c) SELECT max(x) FROM c"

SUMS = "+".join(["x"] * 80)

FIVE = ", ".join(f"stock {letter}" for letter in "abcde")

HOSTILE = {
    "an endless recursion": (ENDLESS, "too many steps"),
    "a product of tables": ("SELECT count(*) FROM stock a, stock b, stock c, stock d, stock e", "too many steps"),
    "slow steps": (
        f"SELECT sum('{'a' * 200}' LIKE '%a%a%a%a%a%a%a%a%a%a%a%a%a%a%a%b') FROM {FIVE}",
        "too many steps",
    ),
    "long rows in a queue": (
        f"WITH RECURSIVE c(n, x) AS (SELECT 1, '{'a' * 380}' UNION SELECT n+1, x||'' FROM c) SELECT count(*) FROM c",
        "too many steps",
    ),
    "nested subqueries": (f"{NESTED} SELECT 1 FROM a7", "at most 3 SELECTs"),
    "wide subqueries": (f"{WIDE}) SELECT 1 FROM {','.join(['b'] * 60)}", "too many"),
    "copied expressions": (f"SELECT {SUMS} x FROM (SELECT {SUMS} x FROM (SELECT id x FROM stock))", "steps"),
    "a huge blob": ("SELECT zeroblob(1000000000)", "not authorized"),
    "a drawn blob": ("SELECT randomblob(1000000000)", "not authorized"),
    "a huge text": ("SELECT printf('%.*c', 1000000000, 'x')", "not authorized"),
    "a growing text": (
        "WITH RECURSIVE c(x) AS (SELECT 'a' UNION ALL SELECT x||x FROM c) SELECT x FROM c",
        "too big",
    ),
    "a long query": (f"SELECT {'1+' * 1000}1", "at most 500 characters"),
    "another file": ("ATTACH '{victim}' AS other", "not authorized"),
    "a new file": ("VACUUM INTO '{folder}/new'", "authorization denied"),
    "a file by a function": ("SELECT writefile('{folder}/new', 'x')", "no such function"),
    "an extension": ("SELECT load_extension('{victim}')", "not authorized"),
    "a setting": ("PRAGMA writable_schema = 1", "not authorized"),
    "a setting as a table": ("SELECT * FROM pragma_database_list", "not authorized"),
    "the count of such a table": ("SELECT count(*) FROM pragma_database_list", "not authorized"),
    "a deletion": ("DELETE FROM stock", "not authorized"),
    "a change": ("UPDATE stock SET price = 0", "not authorized"),
    "a new row": ("INSERT INTO stock VALUES (1, 2, 'x') RETURNING id", "not authorized"),
    "a lost table": ("DROP TABLE stock", "not authorized"),
    "a temporary table": ("CREATE TEMP TABLE x (y)", "not authorized"),
    "a transaction": ("BEGIN EXCLUSIVE", "not authorized"),
    "two statements": ("SELECT 1; DROP TABLE stock", "one statement"),
    "a clock": ("SELECT current_timestamp", "not authorized"),
    "a draw": ("SELECT random()", "not authorized"),
    "no SQL": ("price of 481", "syntax error"),
    "no table": ("SELECT x FROM elsewhere", "no such table"),
    "a placeholder": ("SELECT ?", "bindings"),
    "a zero": ("SELECT 'a\x00'", "null character"),
    "half a pair": ("SELECT '\ud800'", "surrogates"),
    "no text": ("SELECT CAST(x'ff' AS TEXT)", "UTF-8"),
    "deep brackets": (f"SELECT {'(' * 200}1{')' * 200}", "overflow"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_query_is_an_error_to_the_policy_and_hurts_nothing(
    database: ReadOnlyDatabase, name: str, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    sqlite3.connect(victim).execute("CREATE TABLE secret (word)").connection.close()
    before = victim.read_bytes()
    query, message = HOSTILE[name]
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with within_seconds(), pytest.raises(CallError, match=message):
        database.answer(query.replace("{victim}", str(victim)).replace("{folder}", str(tmp_path)))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - largest < 150 * 1024  # KiB
    assert [path.name for path in tmp_path.iterdir()] == ["victim"]
    assert victim.read_bytes() == before


def test_a_database_leaves_no_file_and_no_two_share_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first, second = (ReadOnlyDatabase({"stock": (("id",), [(number,)])}) for number in (1, 2))
    assert list(tmp_path.iterdir()) == []
    assert (first.answer("SELECT id FROM stock"), second.answer("SELECT id FROM stock")) == ("1", "2")
    first.close()
    second.close()


def test_the_authorizer_alone_and_the_read_only_file_alone_refuse_a_write() -> None:
    database = ReadOnlyDatabase({"stock": (("id",), [(1,)])})
    database._connection.set_authorizer(None)
    with pytest.raises(CallError, match="readonly database"):
        database.answer("DELETE FROM stock")
    with pytest.raises(CallError, match="readonly database"):
        database.answer("CREATE TABLE other (x)")


def test_a_query_of_too_many_steps_leaves_the_next_one_its_own() -> None:
    database = ReadOnlyDatabase({"stock": (("id",), [(1,)])}, SqlLimits(steps=2_000))
    for _ in range(3):
        with pytest.raises(CallError, match="too many steps"):
            database.answer(ENDLESS)
        assert database.answer("SELECT id FROM stock") == "1"
