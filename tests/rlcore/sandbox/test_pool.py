"""Verdicts, failures that are ours, and processes that end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlcore.errors import SandboxError
from rlcore.sandbox import pool as pools
from rlcore.sandbox.base import DEFAULT_LIMITS, ResourceLimits, RunStatus, Sandbox
from rlcore.sandbox.pool import Job, SandboxPool
from tests.rlcore.sandbox.conftest import require_bubblewrap
from tests.rlcore.sandbox.test_attacks import check, children, supervisors
from tests.waiting import LONG, until, until_ended

SHORT = ResourceLimits(wall_seconds=1.0)
BRIEF = ResourceLimits(wall_seconds=LONG, cpu_seconds=1)
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("code", "verdict", "stdout"),
    [
        ("print(6 * 7)", RunStatus.PASS, "42\n"),
        ("print(input())", RunStatus.PASS, "hello\n"),
        ("import sys\nprint(sys.stdin.read(), end='')", RunStatus.PASS, "hello\nworld"),
        ("import sys\nsys.stdout.buffer.write(sys.stdin.buffer.readline())", RunStatus.PASS, "hello\n"),
        ("import sys\nprint('é')\nsys.exit(3)", RunStatus.PASS, "é\n"),
        ("print(1)\nraise ValueError('no')", RunStatus.ERROR, "1\n"),
        ("def f(:", RunStatus.ERROR, ""),
        ("while True: pass", RunStatus.TIMEOUT, ""),
        ("import os\nos._exit(0)", RunStatus.DIED, ""),
        ("print('x' * 300_000)", RunStatus.PROTOCOL, ""),
        (
            "import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: 'int' = 1\nprint(A())",
            RunStatus.PASS,
            "A(x=1)\n",
        ),
        ("import threading as t\nx = t.Thread(target=print, args=(1,))\nx.start()\nx.join()", RunStatus.PASS, "1\n"),
        ("if __name__ == '__main__': print(1)", RunStatus.PASS, "1\n"),
        ("import sys\nprint(sys.stdin.fileno(), len(sys.stdin.readlines()))", RunStatus.PASS, "0 2\n"),
        ("import re, math, collections, itertools, heapq, decimal, random, json, datetime", RunStatus.PASS, ""),
    ],
)
def test_a_run_ends_in_a_verdict(sandbox: SandboxPool, code: str, verdict: RunStatus, stdout: str) -> None:
    limits = ResourceLimits(wall_seconds=0.2) if verdict is RunStatus.TIMEOUT else DEFAULT_LIMITS
    outcome = sandbox.run(code, stdin="hello\nworld", limits=limits)
    assert (outcome.status, outcome.stdout) == (verdict, stdout)


@pytest.mark.parametrize("read", ["open(0).read()", "sys.stdin.read()", "''.join(iter(sys.stdin.readline, ''))"])
def test_an_input_that_is_larger_than_a_pipe_arrives_whole(sandbox: SandboxPool, read: str) -> None:
    text = "0123456789\n" * 30_000
    outcome = sandbox.run(f"import sys\nprint(len({read}))", stdin=text)
    assert (outcome.status, outcome.stdout) == (RunStatus.PASS, f"{len(text)}\n")


def test_what_one_test_did_not_read_is_not_the_input_of_the_next(sandbox: SandboxPool) -> None:
    long, tests = "x" * 200_000, [{"input": "7\n", "output": "7\n"}]
    reference = {"style": "stdin", "tests": [{"input": f"{n}\n{long}", "output": f"{n}\n"} for n in range(3)] + tests}
    assert check(sandbox, reference, "print(input())") == [RunStatus.PASS] * 4


def test_half_a_surrogate_pair_comes_back_as_its_escape(sandbox: SandboxPool) -> None:
    outcome = sandbox.run("raise ValueError('a\\ud800b')")
    assert (outcome.status, outcome.error) == (RunStatus.ERROR, "ValueError: a\\ud800b (line 1)")
    outcome.error.encode()
    forged = (
        "import os\nm = b'u2:s7:printeds3:\\xed\\xa0\\x80'\nos.write(31, len(m).to_bytes(4, 'big') + m)\nwhile 1: pass"
    )
    assert sandbox.run(forged).stdout == "\\ud800"


def test_processor_time_that_is_up_is_time_that_is_up(sandbox: SandboxPool) -> None:
    outcome = sandbox.run("while True: pass", limits=BRIEF)
    assert (outcome.status, outcome.error) == (RunStatus.TIMEOUT, "the CPU time limit was exceeded")


@pytest.mark.slow  # ends at the hard limit, seconds of the processor later
def test_a_program_that_ignores_the_end_of_its_processor_time_is_killed(sandbox: SandboxPool) -> None:
    stubborn = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert sandbox.run(stubborn, limits=BRIEF).status is not RunStatus.PASS


def test_an_exception_is_named_with_its_line(sandbox: Sandbox) -> None:
    assert sandbox.run("x = 1\n1 / 0").error == "ZeroDivisionError: division by zero (line 2)"


def test_the_tests_of_a_program_are_judged_one_by_one(sandbox: SandboxPool) -> None:
    code = "def f(x):\n    if x == 1: raise KeyError(x)\n    while x == 2: pass\n    return {3: print}.get(x, x)"
    tests = [{"args": [x], "output": x} for x in range(4)] + [{"args": [4], "output": 5}]
    verdicts = [RunStatus.PASS, RunStatus.ERROR, RunStatus.TIMEOUT, RunStatus.PROTOCOL, RunStatus.FAIL]
    assert check(sandbox, {"style": "call", "entry_point": "f", "tests": tests}, code, BRIEF) == verdicts


def test_a_program_that_breaks_three_boxes_gets_no_fourth(sandbox: SandboxPool) -> None:
    tests = [{"args": [x], "output": x} for x in range(6)]
    code = "import os\ndef f(x): return x if x == 5 else os._exit(1)"
    assert check(sandbox, {"style": "call", "entry_point": "f", "tests": tests}, code) == [RunStatus.DIED] * 6


def test_a_program_that_answers_before_it_is_asked_has_broken_the_protocol(sandbox: SandboxPool) -> None:
    code = (
        "import os\nmessage = b'u2:s5:valuei9,'\nframe = len(message).to_bytes(4, 'big') + message\n"
        "def f(): os.write(31, frame * 2) if not seen else 0; seen.append(1); return 9\nseen = []"
    )
    reference = {"style": "call", "entry_point": "f", "tests": [{"args": [], "output": 9}] * 2}
    # One write of two answers: the second lies there, unasked, when the second test is due.
    assert check(sandbox, reference, code) == [RunStatus.PASS, RunStatus.PROTOCOL]


def test_assertions_see_the_exceptions_and_the_types_of_the_program(sandbox: SandboxPool) -> None:
    tests = [
        "try:\n    f(0)\nexcept ZeroDivisionError as error:\n    assert 'zero' in str(error)\nelse:\n    assert False",
        "assert f(1) == (1, {2}, {'a': None}, b'x') and type(f(1)) is tuple",
        "assert candidate(x=1)[0] == helper(1)",
        "assert f(1) == 1",
        "f(1).no_such_name",
    ]
    reference = {"style": "assert", "entry_point": "f", "prelude": "def helper(x): return x", "tests": tests}
    # The program's own helper is not the one that the tests use.
    code = "def helper(x): return 7\ndef f(x):\n    1 // x\n    return (x, {2}, {'a': None}, b'x')"
    assert check(sandbox, reference, code) == [RunStatus.PASS] * 3 + [RunStatus.FAIL, RunStatus.ERROR]


ONE = {"style": "assert", "entry_point": "f"}
ALWAYS_ONE = "def f(x): return 1"


@pytest.mark.parametrize(
    "test",
    [
        "assert f(print)", "import os\nos._exit(0)", "assert f(set(range(5_000)))", "assert f('x' * 2_000_000)",
        "f(0)\nf(lambda: 1)",
    ],
)  # fmt: skip
def test_tests_that_break_by_themselves_are_no_verdict_on_the_program(sandbox: SandboxPool, test: str) -> None:
    assert check(sandbox, ONE | {"tests": [test]}, ALWAYS_ONE) == [RunStatus.INFRA]


def test_a_program_fails_with_its_prelude(sandbox: SandboxPool) -> None:
    assert check(sandbox, ONE | {"tests": ["assert f(1)"], "prelude": "1 / 0"}, ALWAYS_ONE) == [RunStatus.ERROR]


def test_data_that_breaks_the_tests_is_an_error_of_the_program(sandbox: SandboxPool) -> None:
    reference = ONE | {"tests": ["assert sum(range(f(1))) == 0"]}
    assert check(sandbox, reference, "def f(x): return 10 ** 12", SHORT) == [RunStatus.TIMEOUT]


GROWS = "def f(x): return 'x' * 1_000_000"
SETS = "def f(x): return list(range(3_000))"


@pytest.mark.parametrize(
    ("code", "test"),
    [
        (GROWS, "assert f(f(1) + f(1)) == 1"),
        (GROWS, "assert f([f(1), f(2)]) == 1"),
        (GROWS, "kept = f(1)\nassert f(kept * 2)"),
        (SETS, "assert f(set(f(1))) == 1"),
        (SETS, "assert f(dict.fromkeys(f(1))) == 1"),
        ("def f(x): return [x]", "x = f(1)\nfor _ in range(60): x = f(x)"),
    ],
)
def test_a_result_larger_than_tests_can_pass_on_is_an_error_of_the_program(
    sandbox: SandboxPool, code: str, test: str
) -> None:
    for tests in ([test], ["assert f(0) is not None", test]):
        assert check(sandbox, ONE | {"tests": tests}, code)[-1] is RunStatus.PROTOCOL


def test_much_output_over_many_tests_is_no_failure_of_ours(sandbox: SandboxPool) -> None:
    tests = [{"input": "", "output": "1\n"}] * 300  # 75 MB, more than a message to the caller may hold
    assert set(check(sandbox, {"style": "stdin", "tests": tests}, "print('x' * 250_000)")) == {RunStatus.FAIL}


SLOW_TO_READ = """
import os
inner = b"t2000:" + b"".join(b"i%x," % (i * (2**61 - 1)) for i in range(2000))
message = b"u2:s5:valuel%d:" % (1_000_000 // len(inner)) + inner * (1_000_000 // len(inner))
def f(x):
    os.write(31, len(message).to_bytes(4, "big"))
    rest = message
    while rest: rest = rest[os.write(31, rest):]
    while True: pass
"""


def test_an_answer_that_takes_long_to_read_is_read_within_the_time_of_its_test(sandbox: SandboxPool) -> None:
    reference = {"style": "call", "entry_point": "f", "tests": [{"args": [1], "output": 1}]}
    limits = ResourceLimits(wall_seconds=0.25)  # reading takes half a second
    job = Job(reference=json.dumps(reference), code=SLOW_TO_READ, limits=limits)
    (outcome,) = sandbox.check(job)
    assert (outcome.status, outcome.error) == (RunStatus.TIMEOUT, "reading the answer exceeded the time limit")


def test_every_limit_of_the_process_is_set(sandbox: SandboxPool) -> None:
    code = (
        "import resource as r\nprint([r.getrlimit(getattr(r, 'RLIMIT_' + k)) for k in ('SIGPENDING', 'NPROC', 'CORE')])"
    )
    assert sandbox.run(code).stdout == "[(16, 16), (16, 16), (0, 0)]\n"


def test_many_at_a_time_keep_their_order(sandbox: SandboxPool) -> None:
    reference = json.dumps({"style": "call", "entry_point": "f", "tests": [{"args": [], "output": 3}]})
    jobs = [Job(reference=reference, code=f"def f(): return {number % 5}") for number in range(20)]
    passed = [one.status is RunStatus.PASS for (one,) in sandbox.check_all(jobs)]
    assert passed == [number % 5 == 3 for number in range(20)]


def test_a_supervisor_that_is_killed_or_closed_is_replaced() -> None:
    require_bubblewrap()
    before = set(supervisors())
    with SandboxPool(num_workers=1) as pool:
        assert pool.run("pass").status is RunStatus.PASS
        (pid,) = set(supervisors()) - before
        os.kill(pid, signal.SIGKILL)
        assert pool.run("print(1)").status is RunStatus.INFRA
        assert pool.run("print(1)").status is RunStatus.PASS
        pool.close()
        assert set(supervisors()) == before
        assert pool.run("print(2)").stdout == "2\n"
    assert set(supervisors()) == before


def test_boxes_end_when_their_caller_is_killed() -> None:
    require_bubblewrap()
    program = (
        "from rlcore.sandbox.pool import SandboxPool\nfrom rlcore.sandbox.base import ResourceLimits\n"
        "pool = SandboxPool(num_workers=1)\npool.run('pass')\nprint('ready', flush=True)\n"
        "pool.run('import time; time.sleep(600)', limits=ResourceLimits(wall_seconds=600.0))"
    )
    caller = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE)
    assert caller.stdout is not None
    assert caller.stdout.readline() == b"ready\n"
    found = until(lambda: boxes_below(caller.pid), "a box")
    caller.kill()
    caller.wait()
    caller.stdout.close()
    until_ended(found)


def boxes_below(pid: int) -> list[int]:
    return [inner for child in children(pid) for inner in (child, *boxes_below(child))]


def test_without_bubblewrap_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with (
        SandboxPool() as pool,
        pytest.raises(SandboxError, match=r"(?s)not installed.*fix:.*apt-get install bubblewrap"),
    ):
        pool.run("print(1)")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_without_namespaces_nothing_is_run(monkeypatch: pytest.MonkeyPatch, open_folder: Path) -> None:
    broken = open_folder / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(pools, "_isolation", lambda backend: pools.Isolation(bwrap=str(broken), image="/"))
    with SandboxPool(num_workers=1) as pool, pytest.raises(SandboxError, match=r"(?s)No permissions.*fix:.*namespaces"):
        pool.run("print(1)")
    broken.chmod(0o600)
    with SandboxPool(num_workers=1) as pool, pytest.raises(SandboxError, match="Permission denied"):
        pool.run("print(1)")


def test_no_isolation_has_to_be_asked_for_by_name_and_is_loud() -> None:
    with pytest.warns(RuntimeWarning, match="UNPROTECTED"), SandboxPool(num_workers=1, backend="unprotected") as pool:
        assert pool.run("import os\nprint(os.getpid() > 1)").stdout == "True\n"
        assert pool.run("while True: pass", limits=ResourceLimits(wall_seconds=0.2)).status is RunStatus.TIMEOUT
