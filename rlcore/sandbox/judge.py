"""The verdict on a program, reached outside its box: it is sent inputs, and what it sends back is compared here.

Call and stdin tests take one box, which never holds an expected output. Assertions are code, so they run in a second
box (the tester), where the program is a proxy: calls and results pass through here, decoded and encoded again as plain
data. A verdict counts only with a nonce that the tester alone was given.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator

from rlcore.sandbox.base import Limits, Outcome, Verdict
from rlcore.sandbox.box import Box, BoxError, Died, OutOfTime, Unruly
from rlcore.sandbox.suite import Suite, same_text, same_value
from rlcore.sandbox.walls import Walls

MAX_BOXES = 3  # per program: what breaks three of them is not given a fourth, and its other tests have failed
_ATTEMPTS = 3
_BROKEN = {OutOfTime: Verdict.TIMEOUT, Died: Verdict.DIED, Unruly: Verdict.PROTOCOL}


def run_program(walls: Walls, code: str, stdin: str, limits: Limits) -> Outcome:
    """Run a program to its end; ``PASS`` says that it ended by itself and without an exception."""

    def attempt() -> list[Outcome]:
        with Box(walls, "candidate", limits) as box:
            try:
                return [_printed(box, code, stdin, limits)]
            except (OutOfTime, Died, Unruly) as broken:
                return [_broken(broken)]

    return _with_retries(attempt, 1)[0]


def check_program(walls: Walls, suite: Suite, code: str, limits: Limits, *, stop_early: bool) -> list[Outcome]:
    """One outcome per test; with ``stop_early`` the tests after the first that did not pass share its outcome."""
    return _with_retries(lambda: _check(walls, suite, code, limits, stop_early), len(suite.tests))


def _with_retries(attempt: Callable[[], list[Outcome]], count: int) -> list[Outcome]:
    """A box that did not start says nothing about the program: try again, then say so."""
    reason = ""
    for _ in range(_ATTEMPTS):
        try:
            return attempt()
        except BoxError as error:
            reason = str(error)
    return [Outcome(verdict=Verdict.INFRA, error=reason)] * count


def _check(walls: Walls, suite: Suite, code: str, limits: Limits, stop_early: bool) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for _ in range(MAX_BOXES):
        for outcome in _session(walls, suite, code, limits, start=len(outcomes)):
            outcomes.append(outcome)
            if stop_early and outcome.verdict is not Verdict.PASS:
                break
        is_over = stop_early and outcomes[-1].verdict is not Verdict.PASS
        if is_over or len(outcomes) == len(suite.tests):
            break
    return outcomes + [outcomes[-1]] * (len(suite.tests) - len(outcomes))


def _session(walls: Walls, suite: Suite, code: str, limits: Limits, *, start: int) -> Iterator[Outcome]:
    """The outcomes of the tests from ``start`` on, up to the first that breaks the box."""
    with Box(walls, "candidate", limits) as box:
        try:
            if suite.style == "stdin":
                yield from _stdin_tests(box, suite, code, limits, start)
                return
            answer = box.ask(("load", suite.program(code)), _deadline(limits))
            if answer[0] != "done":
                yield from [_raised(answer)] * (len(suite.tests) - start)
            elif suite.style == "call":
                yield from _call_tests(box, suite, limits, start)
            else:
                yield from _assertions(walls, box, suite, limits, start)
        except (OutOfTime, Died, Unruly) as broken:
            yield _broken(broken)


def _stdin_tests(box: Box, suite: Suite, code: str, limits: Limits, start: int) -> Iterator[Outcome]:
    for test in suite.tests[start:]:
        outcome = _printed(box, suite.program(code), test["input"], limits)
        is_right = outcome.verdict is not Verdict.PASS or same_text(test["output"], outcome.stdout)
        # Without what it printed: of many tests that would be more than the caller can take.
        yield Outcome(verdict=outcome.verdict if is_right else Verdict.FAIL, error=outcome.error)


def _call_tests(box: Box, suite: Suite, limits: Limits, start: int) -> Iterator[Outcome]:
    for test in suite.tests[start:]:
        answer = _result(box, (suite.entry_point, test["args"], test.get("kwargs", {})), _deadline(limits))
        if answer[0] == "raised":
            yield _raised(answer)
        else:
            yield Outcome(verdict=Verdict.PASS if same_value(test["output"], answer[1]) else Verdict.FAIL)


def _assertions(walls: Walls, box: Box, suite: Suite, limits: Limits, start: int) -> Iterator[Outcome]:
    nonce = secrets.token_hex(16)
    with Box(walls, "tester", limits) as tester:
        tester.tell((nonce, suite.entry_point, suite.prelude, list(suite.tests[start:])), _deadline(limits))
        relay = _Relay(tester, box, nonce, suite.entry_point)
        for _ in suite.tests[start:]:
            yield relay.outcome(_deadline(limits))


class _Relay:
    """Passes calls and results between the two boxes.

    Once the tests hold a result of the program, what breaks them is data that it made up: its fault. Before that, and
    where they pass on what is no data at all, it is a fault of the tests.
    """

    def __init__(self, tester: Box, box: Box, nonce: str, entry_point: str) -> None:
        self._tester, self._box, self._nonce, self._entry_point = tester, box, nonce, entry_point
        self._was_called = False

    def outcome(self, deadline: float) -> Outcome:
        """The tester's verdict on its next test."""
        while True:
            try:
                match self._tester.listen(deadline):
                    case ("verdict", str(word), str(verdict), str(text)) if word == self._nonce:
                        return Outcome(verdict=Verdict(verdict), error=text)
                    case ("call", list(args), dict(kwargs)):
                        request = (self._entry_point, args, kwargs)
                    case ("too large", str(why)):
                        raise Unruly(f"its results made the tests send too much: {why}")
                    case other:
                        raise BoxError(f"the tests cannot be run: {other[1:]}")
            except (OutOfTime, Died, Unruly) as broken:
                if not self._was_called:
                    raise BoxError(f"the tests broke before they called the program: {broken}") from broken
                raise
            self._was_called = True
            self._tester.tell(_result(self._box, request, deadline), deadline)


def _result(box: Box, request: tuple[object, ...], deadline: float) -> tuple[object, ...]:
    """What a call gave: ``("value", value)`` or ``("raised", name, text)``."""
    match box.ask(("call", *request), deadline):
        case ("value", _) | ("raised", str(_), str(_)) as answer:
            return answer
        case ("refused" | "too large", str(why)):
            raise Unruly(f"it returned what is no plain data: {why}")
        case _:
            raise Unruly("an answer of another shape")


def _printed(box: Box, code: str, stdin: str, limits: Limits) -> Outcome:
    match box.ask(("script", code, stdin), _deadline(limits)):
        case ("printed", str(text)):
            outcome = Outcome(verdict=Verdict.PASS, stdout=text)
        case ("raised", str(name), str(message), str(text)):
            outcome = Outcome(verdict=Verdict.ERROR, stdout=text, error=f"{name}: {message}")
        case ("refused" | "too large", str(why)):
            raise Unruly(f"its output cannot be sent: {why}")
        case _:
            raise Unruly("an answer of another shape")
    if len(outcome.stdout) > limits.output_bytes:
        raise Unruly(f"it printed more than {limits.output_bytes} characters")
    return outcome


def _raised(answer: tuple[object, ...]) -> Outcome:
    match answer:
        case ("raised", str(name), str(text)):
            return Outcome(verdict=Verdict.ERROR, error=f"{name}: {text}")
        case _:
            raise Unruly("an answer of another shape")


def _broken(error: OutOfTime | Died | Unruly) -> Outcome:
    return Outcome(verdict=_BROKEN[type(error)], error=str(error))


def _deadline(limits: Limits) -> float:
    return time.monotonic() + limits.wall_seconds
