"""The format reward: exactly one marker, in the right place, in linear time."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from rlcore.rewards.format import FormatOptions, FormatReward, has_format
from rlcore.types import Rollout


@pytest.mark.parametrize(
    ("style", "text", "fits"),
    [
        ("boxed", r"so \boxed{5}.", True),
        ("boxed", r"<think>\boxed{4}</think> \boxed{5}", True),
        ("boxed", r"\boxed{5} \boxed{5}", False),
        ("boxed", r"\boxed{}", False),
        ("boxed", r"\boxed{5", False),
        ("boxed", "<answer>5</answer>", False),
        ("boxed", r"<think> \boxed{5}", False),
        ("answer_tag", "<answer>5</answer>", True),
        ("answer_tag", "<answer>5</answer><answer>6</answer>", False),
        ("answer_tag", "<answer> </answer>", False),
        ("answer_tag", "</answer>5<answer>", False),
        ("hashes", "48+24 = 72\n#### 72", True),
        ("hashes", "#### 7\n#### 8", False),
        ("hashes", "####", False),
        ("think_answer", "<think>3+4</think><answer>7</answer>", True),
        ("think_answer", "3+4</think>\n<answer>7</answer>\n", True),  # the template prefilled <think>
        ("think_answer", "<think></think><answer>7</answer>", False),
        ("think_answer", "<think>3+4</think><answer></answer>", False),
        ("think_answer", "<think>3+4</think> so <answer>7</answer>", False),
        ("think_answer", "<think>3+4</think><answer>7</answer> done", False),
        ("think_answer", "<think>a<think>b</think><answer>7</answer>", False),
        ("think_answer", "<think>a</think><answer>7</answer><answer>8</answer>", False),
        ("think_answer", "<think>a</think><think>b</think><answer>7</answer>", False),
        ("think_answer", "<answer>7</answer>", False),
        ("think_answer", "", False),
    ],
)
def test_a_completion_keeps_to_the_format_or_does_not(style: str, text: str, fits: bool) -> None:
    assert has_format(text, style) is fits


def test_the_reward_is_one_or_zero(make_rollout: Callable[..., Rollout]) -> None:
    reward = FormatReward(FormatOptions(style="boxed"))
    scores = reward([make_rollout(r"\boxed{5}"), make_rollout("5")])
    assert [score.value for score in scores] == [1.0, 0.0]
    assert scores[0].parts == {"format": 1.0}


@pytest.mark.parametrize("style", ["boxed", "answer_tag", "hashes", "think_answer"])
@pytest.mark.parametrize("piece", ["<think>", "</think>", "<answer>", "\\boxed{", "#### \n", " "])
def test_checking_is_quick_for_any_text(style: str, piece: str) -> None:
    started = time.process_time()
    has_format(piece * 30_000, style)
    assert time.process_time() - started < 1.0
