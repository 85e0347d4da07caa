"""Rollouts sampled ahead: their weights, their place in a checkpoint, and errors."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable
from contextlib import closing

import pytest

from rlcore.errors import SamplingError
from rlcore.loop.prefetch import Groups, RolloutPrefetcher, mean_staleness
from rlcore.types import Message, Prompt, Rollout, Score, ScoredRollout, ToolCall
from tests.waiting import LONG

PROMPT = Prompt(prompt_id="p", messages=(Message(role="user", content="3+4"),), token_ids=(3,), reference="7", task="t")


def rollout(*, version: int = 0, logprob: float = -0.5) -> Rollout:
    return Rollout(
        prompt=PROMPT,
        completion_ids=(5, 6, 2),
        sampler_logprobs=(logprob, 0.0, -0.1),
        loss_mask=(True, False, True),
        policy_version=version,
        finish_reason="stop",
        text="7 \N{SNOWMAN}",
        tool_calls=(ToolCall(text="<tool>", tool="calculator", output="7", is_error=False),),
    )


class Engine:
    """Samples with the version that it holds when it is asked, and only after it is let."""

    def __init__(self) -> None:
        self.version, self.may_go, self.asked = 0, threading.Event(), list[int]()
        self.may_go.set()

    def sample(self, iteration: int) -> Groups:
        self.asked.append(iteration)
        version = self.version
        assert self.may_go.wait(LONG)
        return [[rollout(version=version)]]


def test_next_rollouts_are_sampled_in_background() -> None:
    engine = Engine()
    with closing(RolloutPrefetcher()) as ahead:
        ahead.get(engine.sample, 1, until=2)
        ahead.drain()
        engine.may_go.clear()
        ahead.get(engine.sample, 2, until=3)  # does not wait for the third iteration's
        waiter = threading.Thread(target=ahead.drain)
        waiter.start()
        waiter.join(0.2)
        assert waiter.is_alive()
        engine.may_go.set()
        waiter.join(LONG)
        assert not waiter.is_alive()


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_prefetch_keeps_staleness(staleness: int) -> None:
    engine, last, versions = Engine(), 7, dict[int, int]()
    with closing(RolloutPrefetcher()) as ahead:
        for iteration in range(1, last + 1):
            learned = iteration - 1

            def load(version: int = learned) -> None:
                engine.version = version

            until = min(iteration + staleness, last)
            groups = ahead.get(engine.sample, iteration, until=until, prepare=lambda load=load: load)
            versions[iteration] = groups[0][0].policy_version
            ahead.drain()  # as if the learner were slower than the engine
            assert engine.asked == list(range(1, until + 1))
    assert versions == {iteration: max(0, iteration - 1 - staleness) for iteration in versions}


def test_weights_are_copied_now_and_loaded_later() -> None:
    engine, order = Engine(), list[str]()

    def sample(iteration: int) -> Groups:
        order.append(f"sample {iteration}")
        return engine.sample(iteration)

    def prepare() -> Callable[[], None]:
        order.append("copy")
        return lambda: order.append("load")

    with closing(RolloutPrefetcher()) as ahead:
        engine.may_go.clear()
        threading.Timer(0.2, engine.may_go.set).start()
        ahead.get(sample, 1, until=3)
        ahead.get(sample, 2, until=4, prepare=prepare)
        ahead.get(sample, 3, until=4, prepare=prepare)  # nothing is begun, so nothing is copied
        ahead.drain()
    assert order.index("copy") < order.index("load") == len(order) - 2
    assert sorted(order[:-2]) == ["copy", "sample 1", "sample 2", "sample 3"] and order[-1] == "sample 4"


def test_broken_engine_stops_run_early() -> None:
    def broken(iteration: int) -> Groups:
        if iteration == 3:
            raise SamplingError("the engine is gone")
        return [[rollout()]]

    with closing(RolloutPrefetcher()) as ahead:
        ahead.get(broken, 1, until=3)
        with pytest.raises(SamplingError, match="the engine is gone"):
            ahead.drain()
        with pytest.raises(SamplingError, match="the engine is gone"):  # before its rollouts are due
            ahead.get(broken, 2, until=4)


def test_resumed_run_uses_rollouts_of_checkpoint() -> None:
    engine, again = Engine(), Engine()
    with closing(RolloutPrefetcher()) as ahead:
        ahead.get(engine.sample, 1, until=2)
        state = ahead.state()
        expected = ahead.get(engine.sample, 2, until=3)
    again.version = 9
    with closing(RolloutPrefetcher()) as resumed:
        resumed.restore(json.loads(json.dumps(state)), 2)
        assert resumed.get(again.sample, 2, until=3) == expected
    assert again.asked == [3]


def test_checkpoint_without_staleness_has_no_rollouts() -> None:
    with closing(RolloutPrefetcher()) as ahead:
        assert ahead.state() == ""
        ahead.restore("", 1)
        assert ahead.get(Engine().sample, 1, until=1) == [[rollout()]]


def test_rollouts_round_trip_json() -> None:
    own = dataclasses.replace(PROMPT, token_ids=(8, *PROMPT.token_ids))
    other = dataclasses.replace(PROMPT, token_ids=(9,), messages=(Message(role="system", content="Be brief."),))
    branch = dataclasses.replace(rollout(version=1), prompt=other, fork="another system message")
    episode = dataclasses.replace(rollout(), prompt=own, branches=(branch, rollout()), num_sampled=6)
    asked = (Message(role="user", content="3+4\n\nYour turn."),)
    changed = dataclasses.replace(PROMPT, messages=asked, token_ids=(*PROMPT.token_ids, 7), tools="[]")
    of_environment = dataclasses.replace(rollout(), prompt=changed, environment_reward=0.5)
    plain = [rollout(logprob=value) for value in (0.0, -0.1, -1e-300, -1.7e308, -1 / 3)]
    plain[-1] = dataclasses.replace(plain[-1], replica=3)
    groups = [[rollout(), episode], [episode], [of_environment], plain, []]
    with closing(RolloutPrefetcher()) as ahead, closing(RolloutPrefetcher()) as resumed:
        ahead.get(lambda iteration: groups, 1, until=2)
        resumed.restore(ahead.state(), 2)
        found = resumed.get(Engine().sample, 2, until=2)
    assert found == groups
    assert [[each.replica for each in group] for group in found] == [[0, 0], [0], [0], [0] * 4 + [3], []]


def test_a_prompt_is_stored_once_for_all_its_rollouts() -> None:
    prompt = dataclasses.replace(PROMPT, reference="1" * 10_000)
    sizes = []
    for count in (1, 16):
        group = [dataclasses.replace(rollout(), prompt=dataclasses.replace(prompt)) for _ in range(count)]
        with closing(RolloutPrefetcher()) as ahead:
            ahead.get(lambda iteration, group=group: [group], 1, until=2)  # type: ignore[misc]
            sizes.append(len(ahead.state()))
    assert 10_000 < sizes[0] < sizes[1] < 20_000


def test_mean_staleness() -> None:
    # versions 2, 2 and 3 under a learner at 4: (2 + 2 + 1) / 3
    scored = [
        [ScoredRollout(rollout=rollout(version=v), score=Score(value=1.0, terms={})) for v in group]
        for group in ([2, 2], [3])
    ]
    assert mean_staleness(scored, 4) == pytest.approx(5 / 3)
    branched = dataclasses.replace(scored[1][0].rollout, branches=(rollout(version=0),))  # (2 + 2 + 1 + 4) / 4
    scored[1][0] = dataclasses.replace(scored[1][0], rollout=branched)
    assert mean_staleness(scored, 4) == pytest.approx(9 / 4)
