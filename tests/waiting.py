"""Waits for events. A machine's load makes them longer and no test red: only an event that never comes does that."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

LONG = 600.0
"""Seconds after which an event that has not come is a failure; for every wait of a test on something that must come."""


def until(holds: Callable[[], T], what: str = "the event") -> T:
    """Return the first true value of ``holds``."""
    deadline = time.monotonic() + LONG
    while not (found := holds()):
        assert time.monotonic() < deadline, f"{what} has not come within {LONG:.0f} s"
        time.sleep(0.01)
    return found


def is_alive(pid: int) -> bool:
    """Return True if a process runs; one that has ended and whose exit code nobody has read does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until_ended(pids: Iterable[int]) -> None:
    """Return when none of the processes runs."""
    left = set(pids)
    until(lambda: not any(map(is_alive, left)), f"the end of {sorted(left)}")


def given_time(run: Callable[[float], T], is_far_enough: Callable[[T], bool], *, seconds: float) -> T:
    """Return the outcome of a run that its limit of ``seconds`` ended, once it got as far as the test needs.

    A loaded machine may take longer than the limit to reach the point that the test is about: it has more time then.
    """
    while not is_far_enough(found := run(seconds)) and seconds < LONG:
        seconds *= 4.0
    return found
