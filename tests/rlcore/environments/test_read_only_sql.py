"""SQL of a policy: right queries are answered, and hostile ones are an error to the policy and hurt nothing."""

from __future__ import annotations

import resource
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlcore.environments.base import CallError
from rlcore.environments.read_only_sql import MORE, ReadOnlyDatabase, SqlLimits
from tests.quick import within_seconds

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


def test_no_more_rows_are_shown_than_the_limit_and_it_is_said(database: ReadOnlyDatabase) -> None:
    assert database.answer("SELECT id FROM stock").splitlines() == [*map(str, range(20)), MORE]
    endless = "WITH RECURSIVE c(x) AS (SELECT 0 UNION ALL SELECT x+1 FROM c) SELECT x FROM c"
    assert database.answer(endless).splitlines() == [*map(str, range(20)), MORE]
    few = ReadOnlyDatabase({"stock": (("id",), [(1,), (2,)])}, SqlLimits(rows=2))
    assert few.answer("SELECT id FROM stock") == "1\n2"


# In seven subqueries each of which names the one before it twice, SQLite compiles the first one 64 times; in forty of
# them it would take more memory than there is, before it has made a single step.
NESTED = "WITH a0 AS (SELECT 1)" + "".join(f", a{n} AS (SELECT 1 FROM a{n - 1}, a{n - 1})" for n in range(1, 8))
WIDE = "WITH a AS (SELECT 1 FROM " + ",".join(["stock"] * 9) + "), b AS (SELECT 1 FROM " + ",".join(["a"] * 60)
SUMS = "+".join(["x"] * 80)
FIVE = ", ".join(f"stock {letter}" for letter in "abcde")
HOSTILE = {
    "an endless recursion": (
        "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM c) SELECT max(x) FROM c",
        "too many steps",
    ),
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
    endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM c) SELECT max(x) FROM c"
    for _ in range(3):
        with pytest.raises(CallError, match="too many steps"):
            database.answer(endless)
        assert database.answer("SELECT id FROM stock") == "1"
