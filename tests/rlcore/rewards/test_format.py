"""The format reward: exactly one marker, in the right place, in linear time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlcore.errors import ConfigError
from rlcore.rewards.format import FormatOptions, FormatReward, has_format
from rlcore.types import Rollout
from tests.quick import within_seconds


@pytest.mark.parametrize(
    ("style", "text", "fits"),
    [
        ("boxed", r"so \boxed{5}.", True),
        ("boxed", r"<think>\boxed{4}</think> \boxed{5}", True),
        ("boxed", r"\boxed{5} \boxed{5}", False),
        ("boxed", r"\boxed{}", False),
        ("boxed", "\\boxed{\u200b}", False),
        ("boxed", "\\boxed{\u3164\ufeff\u00ad}", False),
        ("boxed", r"\boxed{\text{ }\,}", False),
        ("boxed", r"\boxed{$$}", False),
        ("boxed", r"\boxed{\emptyset}", True),
        ("boxed", r"\boxed{...}", False),
        ("boxed", r"\boxed{?}", False),
        ("boxed", r"\boxed{\ldots}", False),
        ("boxed", r"\boxed{\phantom{7}}", False),
        ("boxed", r"\boxed{\hspace{2cm}}", False),
        ("boxed", r"\boxed{\rule{1cm}{0pt}}", False),
        ("boxed", r"\boxed{~\ }", False),
        ("boxed", r"\boxed{()}", False),
        ("boxed", r"\boxed{\null}", False),
        ("boxed", r"\boxed{\frac{}{}}", False),
        ("boxed", r"\boxed{\underline{\hspace{1cm}}}", False),
        ("boxed", r"\boxed{\strut\enspace}", False),
        ("boxed", r"\boxed{\square}", False),
        ("boxed", r"\boxed{&nbsp;}", False),
        ("boxed", r"\boxed{\varepsilon}", True),
        ("boxed", r"\boxed{\infty}", True),
        ("boxed", r"\boxed{<}", True),
        ("boxed", "\\boxed{∞}", True),
        ("answer_tag", "<answer><b></b></answer>", False),
        ("answer_tag", "<answer>...</answer>", False),
        ("think_answer", "<think>...</think><answer>7</answer>", False),
        ("boxed", r"\boxed{-}", True),
        ("boxed", r"\boxed{5", False),
        ("boxed", "<answer>5</answer>", False),
        ("boxed", r"<think> \boxed{5}", False),
        ("answer_tag", "<answer>5</answer>", True),
        ("answer_tag", "<answer>5</answer><answer>6</answer>", False),
        ("answer_tag", "<answer> </answer>", False),
        ("answer_tag", "<answer>\u200d</answer>", False),
        ("answer_tag", r"<answer>\boxed{}</answer>", False),
        ("answer_tag", "</answer>5<answer>", False),
        ("hashes", "48+24 = 72\n#### 72", True),
        ("hashes", "#### 7\n#### 8", False),
        ("hashes", "####", False),
        ("think_answer", "<think>3+4</think><answer>7</answer>", True),
        ("think_answer", "3+4</think>\n<answer>7</answer>\n", True),  # the template prefilled <think>
        ("think_answer", "<think></think><answer>7</answer>", False),
        ("think_answer", "<think>\u2060</think><answer>7</answer>", False),
        ("think_answer", "<think>3+4</think><answer>\u200b</answer>", False),
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
def test_a_completion_keeps_to_the_format_or_does_not(style: Any, text: str, fits: bool) -> None:
    assert has_format(text, FormatOptions(style=style)) is fits


def test_the_reward_is_one_or_zero(make_rollout: Callable[..., Rollout]) -> None:
    reward = FormatReward(FormatOptions(style="boxed"))
    scores = reward([make_rollout(r"\boxed{5}"), make_rollout("5")])
    assert [score.value for score in scores] == [1.0, 0.0]
    assert scores[0].terms == {"format": 1.0}


@pytest.mark.parametrize("style", ["boxed", "answer_tag", "hashes", "think_answer"])
@pytest.mark.parametrize("piece", ["<think>", "</think>", "<answer>", "\\boxed{", "#### \n", " "])
def test_checking_is_quick_for_any_text(style: Any, piece: str) -> None:
    with within_seconds():
        has_format(piece * 30_000, FormatOptions(style=style))


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("<plan>a</plan><solution>b</solution>", True),
        ("a</plan>\n<solution>b</solution>\n", True),  # the template prefilled <plan>
        ("<solution>b</solution><plan>a</plan>", False),
        ("<plan>a</plan>b</solution>", False),
        ("<plan>a</plan><solution>b</solution>.", False),
        ("<plan>a<solution>b</solution></plan><solution>b</solution>", False),
        ("<plan>a</plan>", False),
    ],
)
def test_tags_of_ones_own_are_checked_in_their_order(text: str, fits: bool) -> None:
    assert has_format(text, FormatOptions(style="tags", tags="plan, solution")) is fits


def test_a_pattern_matches_the_whole_completion(make_rollout: Callable[..., Rollout]) -> None:
    reward = FormatReward(FormatOptions(style="regex", pattern=r"(?s).+\nAnswer: \d+", example="so\nAnswer: 7"))
    texts = ["3 + 4\nAnswer: 7\n", "3 + 4\nAnswer: seven", "Answer: 7", "3\nAnswer: 7 or so", ""]
    values = [score.value for score in reward([make_rollout(text) for text in texts])]
    reward.close()
    assert values == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_a_pattern_that_backtracks_for_ever_is_cut_off_and_the_next_completions_are_judged(
    make_rollout: Callable[..., Rollout],
) -> None:
    """(a+)+b on n letters a takes 2^n steps."""
    reward = FormatReward(FormatOptions(style="regex", pattern="(a+)+b", example="aab", timeout_seconds=0.5))
    evil, good, long = reward([make_rollout(text) for text in ("a" * 60, "ab", "b" * 100_001)])
    reward.close()
    assert (evil.value, good.value, long.value) == (0.0, 1.0, 0.0)


def test_a_pattern_for_what_the_template_writes_itself_is_refused() -> None:
    """It would pay 0 for ever: completions begin after the prefilled tag."""
    pattern = r"(?s)<think>.*</think>.+"
    options = FormatOptions(style="regex", pattern=pattern, example="<think>3+4</think>7")
    with pytest.raises(ConfigError, match="the chat template writes '<think>'"):
        FormatReward(options, prefill="<think>\n")
    FormatReward(options, prefill="").close()


def test_a_pattern_that_does_not_match_its_example_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not match the whole example"):
        FormatReward(FormatOptions(style="regex", pattern=r"\d+", example="7."))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"style": "tags"}, "required by style .tags."),
        ({"style": "boxed", "tags": "a"}, "only by it"),
        ({"style": "tags", "tags": "a, a"}, "different names"),
        ({"style": "tags", "tags": "a,"}, "different names"),
        ({"style": "tags", "tags": "<a>"}, "different names"),
        ({"style": "regex", "pattern": "a"}, "required by style .regex."),
        ({"style": "boxed", "pattern": "a", "example": "a"}, "only by it"),
        ({"style": "regex", "pattern": "(", "example": "("}, "is not a regular expression"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FormatOptions(**options)
