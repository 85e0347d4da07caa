"""Requests to a chat endpoint, through the judge: faults, waiting, connections, limits of servers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from rlcore.errors import ConfigError
from rlcore.types import Rollout, Score
from tests.judge_server import Server, by_length, make_judge, serving
from tests.waiting import LONG, given_time


@pytest.mark.parametrize("fault", ["500", "503", "429", "hang up"])
def test_a_passing_fault_is_tried_again(
    judged: tuple[Server, str], make_rollout: Callable[..., Rollout], fault: str
) -> None:
    state, url = judged
    state.faults = [fault]
    assert make_judge(url, retries=1)([make_rollout("four")])[0].value == 0.4
    assert len(state.bodies) == 2


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("500", "status 500"),
        ("401", "refused with status 401"),
        ("307", "refused with status 307"),  # no redirect is followed
        ("garbage", "not a chat completion"),
        ("list", "not a chat completion"),
        ("empty", "not a chat completion"),
        ("null", "has no text"),
        ("huge", "larger than 1 MiB"),
        ("hang up", "is unreachable"),
        ("drip", "no complete reply within "),
        ("drip of headers", "no complete reply within "),
    ],
)
def test_a_fault_that_stays_leaves_the_rollout_unscored_and_is_not_remembered(
    judged: tuple[Server, str], make_rollout: Callable[..., Rollout], fault: str, error: str
) -> None:
    state, url = judged
    rollouts = [make_rollout("four")]

    def asked_twice(seconds: float) -> tuple[Score, Score]:
        state.faults = [fault]
        reward = make_judge(url, retries=0, timeout_seconds=seconds)
        return reward(rollouts)[0], reward(rollouts)[0]

    first, second = given_time(asked_twice, lambda found: error in found[0].error and not found[1].error, seconds=2.0)
    assert first.value is None
    assert error in first.error
    assert second.value == 0.4


@pytest.mark.parametrize("fault", ["echo", "echo in the status line", "echo in the reply"])
def test_an_endpoint_that_echoes_the_key_brings_it_into_no_error(
    make_rollout: Callable[..., Rollout], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "planted-secret")
    with serving(lambda _: "You sent planted-secret. <rating>") as (state, url):
        state.faults = [fault]
        (score,) = make_judge(url, api_key_env="JUDGE_KEY", retries=0)([make_rollout("four")])
    assert score.value is None
    assert "planted-secret" not in score.error
    assert "***" in score.error


def test_a_key_that_no_header_may_have_is_refused_without_showing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "planted-secret\n")
    with pytest.raises(ConfigError, match="line end") as raised:
        make_judge("http://127.0.0.1:9/v1", api_key_env="JUDGE_KEY")
    assert "planted-secret" not in str(raised.value)


def test_a_server_that_is_not_there_leaves_rollouts_unscored(make_rollout: Callable[..., Rollout]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    score = make_judge(f"http://127.0.0.1:{port}/v1", retries=1)([make_rollout("four")])[0]
    assert score.value is None
    assert "2 tries: the endpoint is unreachable: ConnectionRefusedError" in score.error


def test_no_more_requests_than_allowed_are_under_way(make_rollout: Callable[..., Rollout]) -> None:
    meeting = threading.Barrier(3, timeout=LONG)

    def together(body: Mapping[str, Any]) -> str:
        meeting.wait()
        return by_length(body)

    with serving(together) as (state, url):
        scores = make_judge(url, max_concurrency=3)([make_rollout("x" * n) for n in range(9)])
    assert [score.value for score in scores] == [n / 10 for n in range(9)]
    assert state.most_busy == 3


def test_a_server_that_asks_for_time_is_given_it(
    judged: tuple[Server, str], make_rollout: Callable[..., Rollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    state, url = judged
    waits = list[float]()
    monkeypatch.setattr(time, "sleep", waits.append)
    past = "Wed, 21 Oct 2015 07:28:00"
    said = ["7", format_datetime(datetime.now(UTC) + timedelta(seconds=250)), "soon", past, "999999", "-1"]
    for number, state.retry_after in enumerate(said):
        state.faults = ["429"]
        assert make_judge(url, retries=1)([make_rollout("x" * number)])[0].value == number / 10
    bounds = [(7, 8), (50, 251), (0, 1), (0, 1), (300, 301), (0, 1)]
    assert [low <= wait <= high for wait, (low, high) in zip(waits, bounds, strict=True)] == [True] * 6


def test_requests_one_after_another_share_a_connection(
    judged: tuple[Server, str], make_rollout: Callable[..., Rollout]
) -> None:
    state, url = judged
    reward = make_judge(url)
    for number in range(5):
        reward([make_rollout("x" * number)])
    assert (len(state.bodies), len(state.connections)) == (5, 1)
    reward.close()
    reward([make_rollout("another")])
    assert len(state.connections) == 2
    reward.close()


def test_the_proxy_of_the_environment_is_asked(
    judged: tuple[Server, str], make_rollout: Callable[..., Rollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    state, url = judged
    monkeypatch.setenv("HTTP_PROXY", url.removesuffix("/v1"))
    assert make_judge("http://judge.invalid/v1")([make_rollout("four")])[0].value == 0.4
    assert state.headers[0][0] == "http://judge.invalid/v1/chat/completions"
    monkeypatch.setenv("NO_PROXY", "judge.invalid")
    assert make_judge("http://judge.invalid/v1", retries=0)([make_rollout("four")])[0].value is None
    assert len(state.bodies) == 1


def test_a_server_that_knows_the_old_limit_alone_is_sent_that(
    judged: tuple[Server, str], make_rollout: Callable[..., Rollout]
) -> None:
    state, url = judged
    state.faults = ["422"]
    reward = make_judge(url, retries=0, max_tokens=9)
    assert [score.value for score in reward([make_rollout("four")]) + reward([make_rollout("seven")])] == [0.4, 0.5]
    limits = [{name: body.get(name) for name in ("max_completion_tokens", "max_tokens")} for body in state.bodies]
    old = {"max_completion_tokens": None, "max_tokens": 9}
    assert limits == [{"max_completion_tokens": 9, "max_tokens": None}, old, old]


def test_a_model_that_takes_no_temperature_is_asked_without(
    judged: tuple[Server, str], make_rollout: Callable[..., Rollout]
) -> None:
    state, url = judged
    state.faults = ["400"]
    reward = make_judge(url, retries=0)
    assert [score.value for score in reward([make_rollout("four")]) + reward([make_rollout("seven")])] == [0.4, 0.5]
    assert [body.get("temperature") for body in state.bodies] == [0, None, None]
