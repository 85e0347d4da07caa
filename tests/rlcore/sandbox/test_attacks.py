"""No program passes that is not right, and none gets out of its box. The attacks are rows of ``rows``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlcore.sandbox.base import ResourceLimits, RunStatus
from rlcore.sandbox.pool import Job, SandboxPool
from tests.rows import rows_of
from tests.waiting import LONG

# Ways in which tests call a function, each with a right answer of ``square``.
IDIOMS: tuple[str, ...] = (
    "for y, z in zip(map({f}, [1, 2]), [1, 4]): assert y == z", "for y in map({f}, [3]): assert y == 9",
    "for x, y in zip([1, 2], map({f}, [1, 2])): assert y == x * x",
    "assert all(y == z for y, z in zip(map({f}, [1, 2]), [1, 4]))", "assert not [y for y in map({f}, [3]) if y != 9]",
    "assert not list(filter(lambda y: y != 9, map({f}, [3])))", "assert not any(y != 9 for y in map({f}, [3]))",
    "for y in filter({f}, [3]): assert y == 3", "for y in iter(lambda: {f}(3), 9): assert False",
    "import itertools\nfor y in itertools.starmap({f}, [(3,)]): assert y == 9",
    "import itertools\nfor y in itertools.takewhile({f}, [3]): assert y == 3", "[y for y in map({f}, [3])]",
    "list(map({f}, [1, 2, 3]))", "sum(map({f}, [1, 2]))", "max(map({f}, [1, 2]), default=0)", "set(map({f}, [1]))",
    "dict(zip([1], map({f}, [1])))", "assert next(map({f}, [3]), 9) == 9",
    "assert [{f}(x) for x in (1, 2)] == [1, 4]",
    "async def g(): return {f}(3)\ntry:\n    g().send(None)\nexcept StopIteration as end:\n    assert end.value == 9",
)  # fmt: skip

# Each should be refused as ``square``: tested with 3 → 9 and 5 → 25, as values and as assertions.
FAKES = {row["attack"]: row["program"] for row in rows_of(__file__, "fakes")}
ESCAPES = {row["attack"]: row["program"] for row in rows_of(__file__, "escapes")}

LIMITS = ResourceLimits(wall_seconds=0.5, cpu_seconds=2)  # no attack has to be given time
PATIENT = ResourceLimits(wall_seconds=LONG)
CALLS = {
    "style": "call",
    "entry_point": "square",
    "tests": [{"args": [3], "output": 9}, {"args": [5], "output": 25}],
}
ASSERTIONS = {"style": "assert", "entry_point": "square", "tests": ["assert square(3) == 9", "assert square(5) == 25"]}
# Written to its own standard output, which is no verdict either.
SCRIPTS = {"style": "stdin", "tests": [{"input": "3\n", "output": "9\n"}, {"input": "5\n", "output": "25\n"}]}


def check(
    sandbox: SandboxPool, reference: dict[str, object], code: str, limits: ResourceLimits = PATIENT
) -> list[RunStatus]:
    job = Job(reference=json.dumps(reference), code=code, limits=limits)
    return [outcome.status for outcome in sandbox.check(job)]


@pytest.mark.parametrize("reference", [CALLS, ASSERTIONS], ids=["call", "assert"])
def test_a_fake_does_not_pass(
    sandbox: SandboxPool, reference: dict[str, object], record_property: Callable[[str, object], None]
) -> None:
    record_property("hostile", len(FAKES))
    jobs = [Job(reference=json.dumps(reference), code=code, limits=LIMITS) for code in FAKES.values()]
    outcomes = dict(zip(FAKES, sandbox.check_all(jobs), strict=True))
    verdicts = {name: [one.status for one in each] for name, each in outcomes.items()}
    assert [name for name, each in verdicts.items() if each == [RunStatus.PASS] * 2] == []
    assert [name for name, each in verdicts.items() if RunStatus.INFRA in each] == []  # the program's fault, not ours


@pytest.mark.parametrize("name", [name for name in FAKES if "ends the" in name])
def test_no_way_of_calling_a_function_takes_a_raised_end_for_an_answer(
    sandbox: SandboxPool, name: str, record_property: Callable[[str, object], None]
) -> None:
    tests = [idiom.format(f=called) for idiom in IDIOMS for called in ("square", "candidate")]
    record_property("hostile", len(tests))
    record_property("sound", len(tests))
    reference = {"style": "assert", "entry_point": "square", "tests": tests}
    assert RunStatus.PASS not in check(sandbox, reference, FAKES[name])
    assert set(check(sandbox, reference, "def square(x): return x * x")) == {RunStatus.PASS}


@pytest.mark.parametrize(
    ("code", "verdicts"),
    [
        ("n = int(input())\nprint(n * n)", [RunStatus.PASS] * 2),
        ("print(9)", [RunStatus.PASS, RunStatus.FAIL]),
        ("import os\nos._exit(0)", [RunStatus.DIED] * 2),
        ("import sys\nsys.exit(0)", [RunStatus.FAIL] * 2),
        ("import os\nos.write(1, b'9')", [RunStatus.PASS, RunStatus.FAIL]),
        ("n = int(input())\nprint(n * n)\nraise ValueError", [RunStatus.ERROR] * 2),
        ("print(9, 25)", [RunStatus.FAIL] * 2),
    ],
)
def test_a_script_is_judged_by_what_it_prints(sandbox: SandboxPool, code: str, verdicts: list[RunStatus]) -> None:
    assert check(sandbox, SCRIPTS, code) == verdicts


def test_a_program_stays_in_its_box(sandbox: SandboxPool, record_property: Callable[[str, object], None]) -> None:
    record_property("hostile", len(ESCAPES))
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda code: sandbox.run(code, limits=LIMITS), ESCAPES.values()))
    outcomes = dict(zip(ESCAPES, found, strict=True))
    assert [name for name, each in outcomes.items() if "ESCAPED" in each.stdout] == []
    assert [name for name, each in outcomes.items() if each.status is RunStatus.INFRA] == []


def test_the_boxes_work_after_all_that_and_nothing_is_left_over(sandbox: SandboxPool) -> None:
    for code in ("import os\nos._exit(1)", "while True: pass", ESCAPES["fork"]):
        sandbox.run(code, limits=LIMITS)
    assert check(sandbox, CALLS, "def square(x): return x * x") == [RunStatus.PASS] * 2
    assert check(sandbox, ASSERTIONS, "def square(x): return x * x") == [RunStatus.PASS] * 2
    assert len(supervisors()) == 2
    assert [child for pid in supervisors() for child in children(pid)] == []


def supervisors() -> list[int]:
    return [pid for pid in children(os.getpid()) if "rlcore.sandbox.supervisor" in command(pid)]


def children(pid: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
        if int(fields[1]) == pid:
            found.append(int(status.parent.name))
    return found


def command(pid: int) -> str:
    return (Path("/proc") / str(pid) / "cmdline").read_text().replace("\0", " ")
