"""The verdict on a program, reached outside its box: it is sent inputs, and what it sends back is compared here.

Call and stdin tests take one box, which never holds an expected output. Assertions are code, so they run in a second
box (the tester), where the program is a proxy: calls and results pass through here, decoded and encoded again as plain
data. A verdict counts only with a nonce that the tester alone was given. A checker is code too: its tests are
assertions on what the program printed or returned.

Where tests expect few and short answers (yes or no), a program could pass by their order and ignore its input. What has
passed then is asked again, in an order drawn for this program: a program that answers by turns has passed no test.
"""

from __future__ import annotations

import hashlib
import math
import random
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.sandbox.base import ResourceLimits, RunResult, RunStatus
from rlcore.sandbox.box import Box, BoxError, OutOfTime, ProcessDied, ProtocolViolation
from rlcore.sandbox.isolation import Isolation
from rlcore.sandbox.output_check import same_text, same_value, shown
from rlcore.sandbox.suite import Suite, answers_by_turns
from rlcore.sandbox.usual_names import USUAL_NAMES
from rlcore.sandbox.wire import MAX_FRAME_BYTES

MAX_BOXES = 3  # per program: what breaks three of them is not given a fourth, and its other tests have failed
MAX_REPEATS = 24  # tests that are asked again
_LUCK = 1e-3  # a program that ignores its input passes them as rarely as that
_ATTEMPTS = 3
_PASSED = RunResult(status=RunStatus.PASS)
_BY_TURNS = RunResult(status=RunStatus.FAIL, error="its answers change when the tests are asked again in another order")
_BROKEN = {OutOfTime: RunStatus.TIMEOUT, ProcessDied: RunStatus.DIED, ProtocolViolation: RunStatus.PROTOCOL}


def run_program(walls: Isolation, code: str, stdin: str, limits: ResourceLimits) -> RunResult:
    """Run a program to its end; ``PASS`` says that it ended by itself and without an exception."""

    def attempt() -> list[RunResult]:
        with Box(walls, "candidate", limits) as box:
            try:
                return [_printed(box, code, stdin, limits.output_bytes, _deadline(limits))]
            except (OutOfTime, ProcessDied, ProtocolViolation) as broken:
                return [_broken(broken)]

    return _with_retries(attempt, 1)[0]


def check_program(
    walls: Isolation, suite: Suite, code: str, limits: ResourceLimits, *, stop_early: bool
) -> list[RunResult]:
    """One outcome per test; with ``stop_early`` the tests after the first that did not pass share its outcome."""
    return _with_retries(lambda: _check(walls, suite, code, limits, stop_early), len(suite.tests))


def _with_retries(attempt: Callable[[], list[RunResult]], count: int) -> list[RunResult]:
    """A box that did not start says nothing about the program: try again, then say so."""
    reason = ""
    for _ in range(_ATTEMPTS):
        try:
            return attempt()
        except BoxError as error:
            reason = str(error)
    return [RunResult(status=RunStatus.INFRA, error=reason)] * count


def _check(walls: Isolation, suite: Suite, code: str, limits: ResourceLimits, stop_early: bool) -> list[RunResult]:
    outcomes: list[RunResult] = []
    for _ in range(MAX_BOXES):
        for outcome in _session(walls, suite, code, limits, suite.tests[len(outcomes) :]):
            outcomes.append(outcome)
            if stop_early and outcome.status is not RunStatus.PASS:
                break
        is_over = stop_early and outcomes[-1].status is not RunStatus.PASS
        if is_over or len(outcomes) == len(suite.tests):
            break
    outcomes += [outcomes[-1]] * (len(suite.tests) - len(outcomes))
    if stop_early and outcomes[-1].status is not RunStatus.PASS:
        return outcomes
    is_sure = all(
        outcome.status is RunStatus.PASS
        for outcome in _session(walls, suite, code, limits, _repeats(suite, code, outcomes))
    )
    return outcomes if is_sure else [_BY_TURNS if one.status is RunStatus.PASS else one for one in outcomes]


def _repeats(suite: Suite, code: str, outcomes: Sequence[RunResult]) -> list[object]:
    """The tests to ask again, drawn for this program of those that it passed."""
    passed = [test for test, one in zip(suite.tests, outcomes, strict=True) if one.status is RunStatus.PASS]
    share = answers_by_turns(suite)
    if not share or not passed:
        return []
    draws = random.Random(hashlib.sha256(code.encode("utf-8", "surrogatepass")).digest())
    return draws.choices(passed, k=min(math.ceil(math.log(_LUCK, share)), MAX_REPEATS))


def _session(
    walls: Isolation, suite: Suite, code: str, limits: ResourceLimits, tests: Sequence[Any]
) -> Iterator[RunResult]:
    """The outcomes of ``tests``, up to the first that breaks the box."""
    if not tests:
        return
    with Box(walls, "candidate", limits) as box:
        try:
            if suite.style != "stdin":
                names = [USUAL_NAMES] if suite.style == "call" else []
                answer = box.ask(("load", suite.program(code), *names), _deadline(limits))
                if answer[0] != "done":
                    yield from [_raised(answer)] * len(tests)
                    return
            if suite.style == "assert" or suite.checker:
                yield from _assertions(walls, _Asked(box, suite, code, limits), tests)
                return
            for test in tests:
                asked = _Asked(box, suite, code, limits)
                yield _compared(suite, test, asked.answer(test, _deadline(limits)))
        except (OutOfTime, ProcessDied, ProtocolViolation) as broken:
            yield _broken(broken)


def _compared(suite: Suite, test: Mapping[str, Any], answer: tuple[object, ...]) -> RunResult:
    """The outcome of a test whose expected output is known; without all that was printed, which may be much."""
    if answer[0] == "raised":
        return _raised(answer)
    wanted, found = test["output"], answer[1]
    if suite.style == "stdin":
        verb, is_right = "printed", same_text(wanted, str(found), suite.tolerance)
    else:
        verb, is_right = "returned", same_value(wanted, found, suite.tolerance)
    if is_right:
        return _PASSED
    return RunResult(status=RunStatus.FAIL, error=f"it {verb} {shown(found)}, expected {shown(wanted)}")


def _assertions(walls: Isolation, asked: _Asked, tests: Sequence[Any]) -> Iterator[RunResult]:
    suite, nonce = asked.suite, secrets.token_hex(16)
    with Box(walls, "tester", asked.limits) as tester:
        name, prelude = ("candidate", suite.checker) if suite.checker else (suite.entry_point, suite.prelude)
        texts = [_checked(suite, test) if suite.checker else test for test in tests]
        tester.send((nonce, name, prelude, texts), _deadline(asked.limits))
        relay = _Relay(tester, asked, nonce)
        for test in tests:
            yield relay.outcome(test, _deadline(asked.limits))


def _checked(suite: Suite, test: Mapping[str, Any]) -> str:
    """The assertion that a task's checker takes the answer to a test."""
    if suite.style == "stdin":
        return f"assert check({test['input']!r}, candidate(), {test['output']!r})"
    return f"assert check({test['args']!r}, candidate(), {test['output']!r})"


@dataclass(frozen=True, slots=True)
class _Asked:
    """A program in its box."""

    box: Box
    suite: Suite
    code: str
    limits: ResourceLimits

    def answer(self, test: Mapping[str, Any], deadline: float) -> tuple[object, ...]:
        """``("value", what the program printed or returned)``, or ``("raised", name, text)``."""
        if self.suite.style == "call":
            return self.call(test["args"], test.get("kwargs", {}), deadline)
        most = max(self.limits.output_bytes, 2 * len(test["output"].encode("utf-8", "surrogatepass")))
        outcome = _printed(self.box, self.suite.program(self.code), test["input"], most, deadline)
        if outcome.status is RunStatus.PASS:
            return "value", outcome.stdout
        return "raised", *outcome.error.split(": ", 1)

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any], deadline: float) -> tuple[object, ...]:
        """What a call of its function gives."""
        request = ("call", self.suite.entry_point, args, kwargs, self.suite.style == "call")
        match self.box.ask(request, deadline):
            case ("value", _) | ("raised", str(_), str(_)) as answer:
                return answer
            case ("refused" | "too large", str(why)):
                raise ProtocolViolation(f"it returned what is no plain data: {why}")
            case _:
                raise ProtocolViolation("an answer of another shape")


class _Relay:
    """Passes calls and results between the two boxes.

    Once the tests hold a result of the program, what breaks them is data that it made up: its error. Before that, and
    where they pass on what is no data at all, it is a error of the tests.
    """

    def __init__(self, tester: Box, asked: _Asked, nonce: str) -> None:
        self._tester, self._asked, self._nonce = tester, asked, nonce
        self._was_called = False

    def outcome(self, test: Any, deadline: float) -> RunResult:
        """The tester's verdict on its next test."""
        while True:
            try:
                match self._tester.receive(deadline):
                    case ("verdict", str(word), str(verdict), str(text)) if word == self._nonce:
                        return RunResult(status=RunStatus(verdict), error=text)
                    case ("call", list(args), dict(kwargs)):
                        pass
                    case ("too large", str(why)):
                        raise ProtocolViolation(f"its results made the tests send too much: {why}")
                    case other:
                        raise BoxError(f"the tests cannot be run: {other[1:]}")
            except (OutOfTime, ProcessDied, ProtocolViolation) as broken:
                if not self._was_called:
                    raise BoxError(f"the tests broke before they called the program: {broken}") from broken
                raise
            self._was_called = True
            ask = self._asked
            answer = ask.answer(test, deadline) if ask.suite.checker else ask.call(args, kwargs, deadline)
            self._tester.send(answer, deadline)


def _printed(box: Box, code: str, stdin: str, most: int, deadline: float) -> RunResult:
    """What a script printed, which is at most ``most`` bytes."""
    match box.ask(("script", code, stdin, most), deadline, most=4 * most + MAX_FRAME_BYTES):
        case ("printed", str(text)):
            return RunResult(status=RunStatus.PASS, stdout=text)
        case ("raised", str(name), str(message), str(text)):
            return RunResult(status=RunStatus.ERROR, stdout=text, error=f"{name}: {message}")
        case ("refused" | "too large", str(why)):
            raise ProtocolViolation(why)
        case _:
            raise ProtocolViolation("an answer of another shape")


def _raised(answer: tuple[object, ...]) -> RunResult:
    match answer:
        case ("raised", str(name), str(text)):
            return RunResult(status=RunStatus.ERROR, error=f"{name}: {text}")
        case _:
            raise ProtocolViolation("an answer of another shape")


def _broken(error: OutOfTime | ProcessDied | ProtocolViolation) -> RunResult:
    return RunResult(status=_BROKEN[type(error)], error=str(error))


def _deadline(limits: ResourceLimits) -> float:
    return time.monotonic() + limits.wall_seconds
