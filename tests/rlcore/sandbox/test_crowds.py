"""Untrusted programs in number: images made by many at once, hostile programs among honest ones on a busy machine."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlcore.sandbox.base import ResourceLimits, RunStatus
from rlcore.sandbox.pool import Job, SandboxPool
from tests.rlcore.sandbox.conftest import require_bubblewrap
from tests.rlcore.sandbox.test_attacks import ASSERTIONS, CALLS, ESCAPES, FAKES, IDIOMS, SCRIPTS
from tests.rlcore.sandbox.test_image import MANY

pytestmark = pytest.mark.slow

ROUNDS, STARTS = 24, 4
SCORINGS, HOSTILE = 2_000, 0.05
# So patient that no right program runs out of time; a hostile one may have the second that it costs.
PATIENT, BRIEF = ResourceLimits(wall_seconds=120.0), ResourceLimits(wall_seconds=1.0, cpu_seconds=2)
RIGHT = {"call": "def square(x): return x * x", "stdin": "n = int(input())\nprint(n * n)"}
WRONG = {"call": "def square(x): return x + x", "stdin": "print(9)"}


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """A machine that has something else to do."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for each in others:
            each.kill()
            each.wait()


def test_images_made_by_several_processes_at_once_are_one_image_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    record_property("hostile", ROUNDS * STARTS)
    failed = 0
    for number in range(ROUNDS):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / str(number)))
        pipe = subprocess.PIPE
        started = [
            subprocess.Popen([sys.executable, "-c", MANY], stdin=pipe, stdout=pipe, text=True) for _ in range(STARTS)
        ]
        said = {process.communicate("go\n")[0] for process in started}
        failed += any(process.returncode for process in started) or len(said) > 1
    assert failed == 0


def jobs(count: int) -> Iterator[tuple[Job, bool | None]]:
    """A program and whether it is right; None where it is hostile: it may earn nothing, and its faults are its own."""
    draw = random.Random(14)
    for _ in range(count):
        suite = draw.choice((CALLS, ASSERTIONS, SCRIPTS))
        style = "stdin" if suite is SCRIPTS else "call"
        if draw.random() < HOSTILE:
            code = draw.choice(list((ESCAPES if style == "stdin" else FAKES | ESCAPES).values()))
            yield Job(reference=json.dumps(suite), code=code, limits=BRIEF), None
        else:
            is_right = draw.random() < 0.5
            code = (RIGHT if is_right else WRONG)[style] + f"\n# {draw.random()}"
            yield Job(reference=json.dumps(suite), code=code, limits=PATIENT), is_right


def test_hostile_programs_among_honest_ones_change_no_verdict_on_a_busy_machine(
    record_property: Callable[[str, object], None],
) -> None:
    require_bubblewrap()
    expected = list(jobs(SCORINGS))
    record_property("hostile", sum(right is None for _, right in expected))
    record_property("sound", sum(right is not None for _, right in expected))
    with busy(2), SandboxPool(num_workers=4) as pool:
        outcomes = pool.check_all([job for job, _ in expected])
    found = [all(one.status is RunStatus.PASS for one in each) for each in outcomes]
    wrong = [place for place, (_, right) in enumerate(expected) if found[place] is not bool(right)]
    blamed = [place for place, each in enumerate(outcomes) if any(one.status is RunStatus.INFRA for one in each)]
    assert (len(found), wrong, blamed) == (SCORINGS, [], [])


@pytest.mark.parametrize("name", FAKES)
def test_no_fake_passes_by_any_way_of_calling_it(name: str, record_property: Callable[[str, object], None]) -> None:
    require_bubblewrap()
    tests = [idiom.format(f="square") for idiom in IDIOMS]
    record_property("hostile", len(tests))
    reference = {"style": "assert", "entry_point": "square", "tests": tests}
    with SandboxPool(num_workers=1) as pool:
        verdicts = [
            one.status for one in pool.check(Job(reference=json.dumps(reference), code=FAKES[name], limits=BRIEF))
        ]
    assert verdicts != [RunStatus.PASS] * len(tests)
    assert RunStatus.INFRA not in verdicts
