"""Check of a program, decided outside its box: the box gets inputs, and its outputs are compared here.

Call and stdin tests use one box, which never holds an expected output. Assertions are code, so they run in a second box
(the tester) with a proxy for the program. Calls and results pass through this process as plain data. A result counts
only with a nonce that only the tester received. A checker is code too: its tests are assertions on the program's
output.

If tests expect few short answers (yes or no), a program could pass by their order and ignore its input. Passed tests
are then repeated in an order drawn for this program. A program whose answers change has passed no test.
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
from rlcore.sandbox.box import Box, BoxError, Broken
from rlcore.sandbox.isolation import Isolation
from rlcore.sandbox.suite import Suite, guess_rate, same_text, same_value, shown
from rlcore.sandbox.wire import MAX_FRAME_BYTES

MAX_BOXES = 3  # per program; after three broken boxes, its other tests count as failed
MAX_REPEATS = 24  # repeated tests
_CHANCE = 1e-3  # probability that a program that ignores its input passes the repeats
_ATTEMPTS = 3
_PASSED = RunResult(status=RunStatus.PASS)
_ORDER_DEPENDENT = RunResult(
    status=RunStatus.FAIL, error="the answers change when the tests are repeated in another order"
)


def run_program(isolation: Isolation, code: str, stdin: str, limits: ResourceLimits) -> RunResult:
    """Run a program to its end. ``PASS`` means that it ended without an exception."""

    def attempt() -> list[RunResult]:
        with Box(isolation, "candidate", limits) as box:
            try:
                return [_printed(box, code, stdin, limits.output_bytes, _deadline(limits))]
            except Broken as broken:
                return [_broken(broken)]

    return _with_retries(attempt, 1)[0]


def check_program(
    isolation: Isolation, suite: Suite, code: str, limits: ResourceLimits, *, stop_early: bool
) -> list[RunResult]:
    """Return one result per test. With ``stop_early``, tests after the first failure get its result."""
    return _with_retries(lambda: _check(isolation, suite, code, limits, stop_early), len(suite.tests))


def _with_retries(attempt: Callable[[], list[RunResult]], count: int) -> list[RunResult]:
    """Retry if a box does not start, which is no fact about the program. Return ``INFRA`` after the last attempt."""
    reason = ""
    for _ in range(_ATTEMPTS):
        try:
            return attempt()
        except BoxError as error:
            reason = str(error)
    return [RunResult(status=RunStatus.INFRA, error=reason)] * count


def _check(isolation: Isolation, suite: Suite, code: str, limits: ResourceLimits, stop_early: bool) -> list[RunResult]:
    outcomes: list[RunResult] = []
    for _ in range(MAX_BOXES):
        for outcome in _session(isolation, suite, code, limits, suite.tests[len(outcomes) :]):
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
        for outcome in _session(isolation, suite, code, limits, _repeats(suite, code, outcomes))
    )
    return outcomes if is_sure else [_ORDER_DEPENDENT if one.status is RunStatus.PASS else one for one in outcomes]


def _repeats(suite: Suite, code: str, outcomes: Sequence[RunResult]) -> list[object]:
    passed = [test for test, one in zip(suite.tests, outcomes, strict=True) if one.status is RunStatus.PASS]
    fraction = guess_rate(suite)
    if not fraction or not passed:
        return []
    draws = random.Random(hashlib.sha256(code.encode("utf-8", "surrogatepass")).digest())
    return draws.choices(passed, k=min(math.ceil(math.log(_CHANCE, fraction)), MAX_REPEATS))


def _session(
    isolation: Isolation, suite: Suite, code: str, limits: ResourceLimits, tests: Sequence[Any]
) -> Iterator[RunResult]:
    if not tests:
        return
    with Box(isolation, "candidate", limits) as box:
        try:
            if suite.style != "stdin":
                names = [USUAL_NAMES] if suite.style == "call" else []
                answer = box.ask(("load", suite.program(code), *names), _deadline(limits))
                if answer[0] != "done":
                    yield from [_raised(answer)] * len(tests)
                    return
            if suite.style == "assert" or suite.checker:
                yield from _assertions(isolation, _LoadedProgram(box, suite, code, limits), tests)
                return
            for test in tests:
                program = _LoadedProgram(box, suite, code, limits)
                yield _compared(suite, test, program.answer(test, _deadline(limits)))
        except Broken as broken:
            yield _broken(broken)


def _compared(suite: Suite, test: Mapping[str, Any], answer: tuple[object, ...]) -> RunResult:
    """Return the result of a test with a known output. The printed output is dropped, since it may be large."""
    if answer[0] == "raised":
        return _raised(answer)
    wanted, found = test["output"], answer[1]
    if suite.style == "stdin":
        verb, is_right = "printed", same_text(wanted, str(found), suite.tolerance)
    else:
        verb, is_right = "returned", same_value(wanted, found, suite.tolerance)
    if is_right:
        return _PASSED
    return RunResult(status=RunStatus.FAIL, error=f"{verb} {shown(found)}, expected {shown(wanted)}")


def _assertions(isolation: Isolation, program: _LoadedProgram, tests: Sequence[Any]) -> Iterator[RunResult]:
    suite, nonce = program.suite, secrets.token_hex(16)
    with Box(isolation, "tester", program.limits) as tester:
        name, prelude = ("candidate", suite.checker) if suite.checker else (suite.entry_point, suite.prelude)
        texts = [_checked(suite, test) if suite.checker else test for test in tests]
        tester.send((nonce, name, prelude, texts), _deadline(program.limits))
        relay = _Relay(tester, program, nonce)
        for test in tests:
            yield relay.outcome(test, _deadline(program.limits))


def _checked(suite: Suite, test: Mapping[str, Any]) -> str:
    given = test["input" if suite.style == "stdin" else "args"]
    return f"assert check({given!r}, candidate(), {test['output']!r})"


@dataclass(frozen=True, slots=True)
class _LoadedProgram:
    box: Box
    suite: Suite
    code: str
    limits: ResourceLimits

    def answer(self, test: Mapping[str, Any], deadline: float) -> tuple[object, ...]:
        """Return ``("value", printed or returned value)`` or ``("raised", name, text)``."""
        if self.suite.style == "call":
            return self.call(test["args"], test.get("kwargs", {}), deadline)
        max_bytes = max(self.limits.output_bytes, 2 * len(test["output"].encode("utf-8", "surrogatepass")))
        outcome = _printed(self.box, self.suite.program(self.code), test["input"], max_bytes, deadline)
        if outcome.status is RunStatus.PASS:
            return "value", outcome.stdout
        return "raised", *outcome.error.split(": ", 1)

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any], deadline: float) -> tuple[object, ...]:
        request = ("call", self.suite.entry_point, args, kwargs, self.suite.style == "call")
        match self.box.ask(request, deadline):
            case ("value", _) | ("raised", str(_), str(_)) as answer:
                return answer
            case ("refused" | "too large", str(why)):
                raise Broken(RunStatus.PROTOCOL, f"the program did not return plain data: {why}")
            case _:
                raise Broken(RunStatus.PROTOCOL, "the answer has the wrong shape")


class _Relay:
    """Relay of calls and results between the two boxes.

    Once the tests hold a result of the program, an error in the tests is an error of the program, whose data caused it.
    Before the first call, it is an error of the tests.
    """

    def __init__(self, tester: Box, program: _LoadedProgram, nonce: str) -> None:
        self._tester, self._program, self._nonce = tester, program, nonce
        self._was_called = False

    def outcome(self, test: Any, deadline: float) -> RunResult:
        while True:
            try:
                match self._tester.receive(deadline):
                    case ("verdict", str(word), str(verdict), str(text)) if word == self._nonce:
                        return RunResult(status=RunStatus(verdict), error=text)
                    case ("call", list(args), dict(kwargs)):
                        pass
                    case ("too large", str(why)):
                        raise Broken(RunStatus.PROTOCOL, f"the program's results made the tests send too much: {why}")
                    case other:
                        raise BoxError(f"the tests cannot be run: {other[1:]}")
            except Broken as broken:
                if not self._was_called:
                    raise BoxError(f"the tests failed before they called the program: {broken}") from broken
                raise
            self._was_called = True
            ask = self._program
            answer = ask.answer(test, deadline) if ask.suite.checker else ask.call(args, kwargs, deadline)
            self._tester.send(answer, deadline)


def _printed(box: Box, code: str, stdin: str, max_bytes: int, deadline: float) -> RunResult:
    match box.ask(("script", code, stdin, max_bytes), deadline, max_bytes=4 * max_bytes + MAX_FRAME_BYTES):
        case ("printed", str(text)):
            return RunResult(status=RunStatus.PASS, stdout=text)
        case ("raised", str(name), str(message), str(text)):
            return RunResult(status=RunStatus.ERROR, stdout=text, error=f"{name}: {message}")
        case ("refused" | "too large", str(why)):
            raise Broken(RunStatus.PROTOCOL, why)
        case _:
            raise Broken(RunStatus.PROTOCOL, "the answer has the wrong shape")


def _raised(answer: tuple[object, ...]) -> RunResult:
    match answer:
        case ("raised", str(name), str(text)):
            return RunResult(status=RunStatus.ERROR, error=f"{name}: {text}")
        case _:
            raise Broken(RunStatus.PROTOCOL, "the answer has the wrong shape")


def _broken(broken: Broken) -> RunResult:
    return RunResult(status=broken.status, error=str(broken))


def _deadline(limits: ResourceLimits) -> float:
    return time.monotonic() + limits.wall_seconds


_MODULES = "bisect collections copy datetime functools heapq itertools json math operator random re string sys"
_FROM = {
    "bisect": "bisect_left bisect_right insort insort_left insort_right",
    "collections": "ChainMap Counter OrderedDict defaultdict deque namedtuple",
    "copy": "deepcopy",
    "functools": "cache cached_property cmp_to_key lru_cache partial reduce total_ordering",
    "heapq": "heapify heappop heappush heappushpop heapreplace merge nlargest nsmallest",
    "itertools": "accumulate chain combinations combinations_with_replacement compress count cycle dropwhile groupby "
    "islice pairwise permutations product repeat starmap takewhile tee zip_longest",
    "math": "ceil comb dist exp factorial floor fsum gcd hypot inf isqrt lcm log log10 log2 nan perm pi prod sqrt",
    "operator": "add and_ itemgetter mul or_ sub xor",
    "string": "ascii_letters ascii_lowercase ascii_uppercase digits punctuation",
    "typing": "Any Callable DefaultDict Deque Dict FrozenSet Generator Generic Iterable Iterator List Literal Mapping "
    "NamedTuple NoReturn Optional Sequence Set Tuple Type TypeVar Union",
}
USUAL_NAMES = dict.fromkeys(_MODULES.split(), "") | {
    name: home for home, names in _FROM.items() for name in names.split()
}
"""Maps each name to its module; empty if the name is a module."""
