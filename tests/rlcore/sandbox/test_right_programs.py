"""Programs that would run elsewhere: what becomes of them in a box is what docs/recipes.md says, row by row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlcore.sandbox.base import ResourceLimits, RunStatus
from rlcore.sandbox.pool import Job, SandboxPool
from tests.waiting import LONG

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
    """Return True if the page says that such a program runs."""
    (decision,) = [said for program, said in documented().items() if program.startswith(words)]
    assert decision.startswith(("runs", "wrong"))
    return decision.startswith("runs")


def test_each_row_of_the_page_has_a_program_and_each_program_a_row() -> None:
    told = [
        words for program in documented() for words in {**FUNCTIONS, **LISTS, **SCRIPTS} if program.startswith(words)
    ]
    assert sorted(told) == sorted({**FUNCTIONS, **LISTS, **SCRIPTS})
    assert len(told) == len(documented())


@pytest.mark.parametrize(("words", "code"), [(words, code) for words, codes in FUNCTIONS.items() for code in codes])
def test_a_function_is_judged_as_the_page_says(sandbox: SandboxPool, words: str, code: str) -> None:
    reference = {"style": "call", "entry_point": "f", "tests": [{"args": [1], "output": 1}]}
    (outcome,) = sandbox.check(Job(reference=json.dumps(reference), code=code, limits=PATIENT))
    assert (outcome.status is RunStatus.PASS) is decided(words), outcome
    assert outcome.status is not RunStatus.INFRA


@pytest.mark.parametrize(("words", "code"), [(words, code) for words, codes in LISTS.items() for code in codes])
def test_a_function_of_lists_is_judged_as_the_page_says(sandbox: SandboxPool, words: str, code: str) -> None:
    reference = {"style": "call", "entry_point": "f", "tests": [{"args": [[3, 4]], "output": [3, 4]}]}
    (outcome,) = sandbox.check(Job(reference=json.dumps(reference), code=code, limits=PATIENT))
    assert (outcome.status is RunStatus.PASS) is decided(words), outcome


@pytest.mark.parametrize(("words", "code"), [(words, code) for words, codes in SCRIPTS.items() for code in codes])
def test_a_script_is_judged_as_the_page_says(sandbox: SandboxPool, words: str, code: str) -> None:
    reference = {"style": "stdin", "tests": [{"input": "1\n", "output": "1\n"}]}
    (outcome,) = sandbox.check(Job(reference=json.dumps(reference), code=code, limits=PATIENT))
    assert (outcome.status is RunStatus.PASS) is decided(words), outcome
