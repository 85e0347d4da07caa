"""Programs that would run elsewhere: what becomes of them in a box is what docs/security.md says, row by row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlcore.sandbox.base import Limits, Verdict
from rlcore.sandbox.pool import Job, SandboxPool

PAGE = Path(__file__).parents[3] / "docs" / "security.md"
TITLE = "## Right programs that count as wrong"
PATIENT = Limits(wall_seconds=30.0)
ONE = "def f(x):\n    "
# By the first words of the row: programs of a function f, or scripts, that would answer 1 to an input of 1.
FUNCTIONS: dict[str, tuple[str, ...]] = {
    "ends itself": tuple(
        f"def f(x): return x\nif __name__ == '__main__':\n    {end}"
        for end in ("exit()", "quit()", "import sys\n    sys.exit(0)")
    ),
    "reads its input below": ("def f(x): return x\nif __name__ == '__main__':\n    print(f(int(input())))",),
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
    "returns a set": (f"{ONE}return set(range(2_001))", f"{ONE}return 'x' * (1 << 20)"),
    "uses numpy": (f"{ONE}import numpy\n    return int(numpy.int64(x))",),
    "writes a file": (f"{ONE}open('/tmp/x', 'w').write(str(x))\n    return x",),
}
SCRIPTS: dict[str, tuple[str, ...]] = {
    "ends itself": ("print(input())\nexit()", "print(input())\nquit()", "import sys\nprint(input())\nsys.exit(0)"),
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
    """Whether the page says that such a program runs."""
    (decision,) = [said for program, said in documented().items() if program.startswith(words)]
    assert decision.startswith(("runs", "wrong"))
    return decision.startswith("runs")


def test_each_row_of_the_page_has_a_program_and_each_program_a_row() -> None:
    told = [words for program in documented() for words in {**FUNCTIONS, **SCRIPTS} if program.startswith(words)]
    assert sorted(told) == sorted({**FUNCTIONS, **SCRIPTS})
    assert len(told) == len(documented())


@pytest.mark.parametrize(("words", "code"), [(words, code) for words, codes in FUNCTIONS.items() for code in codes])
def test_a_function_is_judged_as_the_page_says(sandbox: SandboxPool, words: str, code: str) -> None:
    reference = {"style": "call", "entry_point": "f", "tests": [{"args": [1], "output": 1}]}
    (outcome,) = sandbox.check(Job(reference=json.dumps(reference), code=code, limits=PATIENT))
    assert (outcome.verdict is Verdict.PASS) is decided(words), outcome
    assert outcome.verdict is not Verdict.INFRA


@pytest.mark.parametrize(("words", "code"), [(words, code) for words, codes in SCRIPTS.items() for code in codes])
def test_a_script_is_judged_as_the_page_says(sandbox: SandboxPool, words: str, code: str) -> None:
    reference = {"style": "stdin", "tests": [{"input": "1\n", "output": "1\n"}]}
    (outcome,) = sandbox.check(Job(reference=json.dumps(reference), code=code, limits=PATIENT))
    assert (outcome.verdict is Verdict.PASS) is decided(words), outcome
