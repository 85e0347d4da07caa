"""Overlong shaping: linear inside the buffer, no cliff."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.errors import ConfigError
from rlcore.rewards.length import LengthOptions, LengthReward, overlong_penalty
from rlcore.types import Rollout

shapes = st.integers(1, 500).flatmap(lambda limit: st.tuples(st.just(limit), st.integers(1, limit)))


@pytest.mark.parametrize(
    ("length", "penalty"),
    # limit 20, buffer 8: the penalty starts after 12 tokens; (12 - 16) / 8 = -0.5
    [(0, 0.0), (12, 0.0), (13, -0.125), (16, -0.5), (19, -0.875), (20, -1.0), (21, -1.0), (1000, -1.0)],
)
def test_the_penalty_of_dapo_equation_13(length: int, penalty: float) -> None:
    assert overlong_penalty(length, limit=20, buffer=8) == penalty


@given(shapes, st.integers(0, 600))
def test_one_token_more_never_costs_more_than_a_step_of_the_ramp(shape: tuple[int, int], length: int) -> None:
    limit, buffer = shape
    here, there = (overlong_penalty(length + more, limit=limit, buffer=buffer) for more in (0, 1))
    assert -1.0 <= there <= here <= 0.0
    assert here - there <= 1 / buffer + 1e-12


def test_only_tokens_of_the_policy_are_counted(make_rollout: Callable[..., Rollout]) -> None:
    reward = LengthReward(LengthOptions(limit=4, buffer=2))
    whole = make_rollout("some text", num_tokens=4)
    with_tool_output = dataclasses.replace(whole, loss_mask=(True, False, False, True))
    assert [score.value for score in reward([whole, with_tool_output])] == [-1.0, 0.0]


@pytest.mark.parametrize("text", ["", " ", "\u200b", "\u3164\n"])
def test_a_text_that_shows_nothing_is_the_worst(make_rollout: Callable[..., Rollout], text: str) -> None:
    assert LengthReward(LengthOptions(limit=40, buffer=2))([make_rollout(text)])[0].value == -1.0


def test_a_buffer_longer_than_the_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="buffer 9"):
        LengthOptions(limit=8, buffer=9)
