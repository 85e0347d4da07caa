"""Foreign code that does not come back is left behind, with its name in the error."""

from __future__ import annotations

import contextvars
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from rlcore.config import RewardTerm
from rlcore.errors import CallTimeoutError, ConfigError
from rlcore.loop import train
from rlcore.rewards.mix import WeightedReward, WeightedTerm
from rlcore.rewards.user_function import FunctionReward
from rlcore.timeouts import CallTimeout
from rlcore.types import Rollout
from tests.rlcore.loop.conftest import MakeComponents, Tape, make_components, right_answers, start  # noqa: F401
from tests.rlcore.rewards.conftest import make_rollout

SHORT = 0.02
NEVER = 3600.0


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """Event that foreign code waits for, set when the test is over."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture(params=["main", "another"])
def call(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Calls with a deadline, from the main thread and from another one."""

    def direct(work: Any, seconds: float = NEVER) -> Any:
        told = {"name": "the reward function slow", "where": "3 rollouts", "setting": "timeout_minutes"}
        return CallTimeout(seconds=seconds, **told).run(work)

    def elsewhere(work: Any, seconds: float = NEVER) -> Any:
        context = contextvars.copy_context()
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(context.run, direct, work, seconds).result()

    return direct if request.param == "main" else elsewhere


def test_what_comes_back_in_time_is_given_and_what_it_raises_is_raised(call: Callable[..., Any]) -> None:
    assert call(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        call(lambda: 1 / 0)


def test_what_does_not_come_back_is_named(call: Callable[..., Any], released: threading.Event) -> None:
    with pytest.raises(CallTimeoutError, match=r"the reward function slow timed out after 0\.02 s") as caught:
        call(released.wait, SHORT)
    assert caught.value.where == "3 rollouts"
    assert "timeout_minutes" in caught.value.fix


def test_what_is_too_late_as_it_begins_is_named_and_leaves_no_handler(
    call: Callable[..., Any], released: threading.Event
) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    with pytest.raises(CallTimeoutError):
        call(released.wait, 0.0)
    assert signal.getsignal(signal.SIGUSR2) == before


def test_it_runs_in_the_callers_context_with_the_callers_threads(call: Callable[..., Any]) -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)
    variable.set(5)
    assert call(lambda: (variable.get(), torch.get_num_threads())) == (5, torch.get_num_threads())


def test_a_reward_may_set_an_alarm_as_graders_of_mathematics_do() -> None:
    def right(rollouts: Sequence[Rollout]) -> list[float]:
        rang: list[int] = []
        before = signal.signal(signal.SIGALRM, lambda number, _: rang.append(number))
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        while not rang:
            pass
        signal.signal(signal.SIGALRM, before)
        return [float(rang == [signal.SIGALRM])] * len(rollouts)

    before = signal.getsignal(signal.SIGUSR2)
    (score,) = FunctionReward(right, "right")([make_rollout("x")])
    assert score.value == 1.0
    assert signal.getsignal(signal.SIGUSR2) == before


def test_an_async_reward_that_hangs_is_named(
    released: threading.Event,
) -> None:
    async def hangs(rollouts: Sequence[Rollout]) -> list[float]:
        released.wait()
        return [0.0 for _ in rollouts]

    with pytest.raises(CallTimeoutError, match="the reward function hangs timed out"):
        FunctionReward(hangs, "hangs", timeout_minutes=SHORT / 60.0)([make_rollout("x")])


def test_a_reward_that_hangs_ends_the_run_and_the_next_resumes(
    make_components: MakeComponents,  # noqa: F811
    released: threading.Event,
) -> None:
    def hangs(rollouts: Sequence[Rollout]) -> Any:
        if rollouts[0].policy_version == 2:
            released.wait()
        return right_answers(rollouts)

    def reward(function: Any, minutes: float) -> WeightedReward:
        return WeightedReward([WeightedTerm(FunctionReward(function, "hangs", timeout_minutes=minutes), 1.0)])

    with pytest.raises(CallTimeoutError, match="the reward function hangs timed out") as caught:
        train(make_components(reward=reward(hangs, 1.0 / 60.0)), Tape())
    assert "rollouts; the first is of prompt" in caught.value.where
    tape = Tape()
    outcome = train(make_components(reward=reward(right_answers, 60.0)), tape)
    assert len(outcome.history) == 4
    assert any("resume: after iteration" in note for note in tape.notes)


def test_only_a_custom_function_has_a_timeout() -> None:
    RewardTerm(kind="mine:reward", timeout_minutes=5.0)
    with pytest.raises(ConfigError, match="timeout_minutes is only valid"):
        RewardTerm(kind="math", timeout_minutes=5.0)
