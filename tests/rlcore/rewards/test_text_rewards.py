"""Rewards of a completion's form, language, length and repetition, and the reward of an environment."""

from __future__ import annotations

import dataclasses
from itertools import combinations
from typing import Any

import pytest

from rlcore.config import RewardTerm
from rlcore.errors import ConfigError
from rlcore.rewards.format import FormatOptions, FormatReward, has_format
from rlcore.rewards.table import RewardResources, build_rewards
from rlcore.rewards.text_rewards import (
    SCRIPTS,
    STOP_WORDS,
    LanguageOptions,
    LengthOptions,
    language_reward,
    length_reward,
    overlong_penalty,
    repetition_penalty,
)
from rlcore.types import Message
from tests.quick import within_seconds
from tests.rlcore.rewards.conftest import make_rollout
from tests.rows import rows_of


def test_a_completion_keeps_to_the_format_or_does_not() -> None:
    rows = rows_of(__file__, "formats")
    wrong = [
        row
        for row in rows
        if has_format(row["text"], FormatOptions(style=row["style"], tags=row.get("tags", ""))) is not row["fits"]
    ]
    assert wrong == []


@pytest.mark.parametrize("piece", ["<think>", "</think>", "<answer>", "\\boxed{", "#### \n", " "])
def test_checking_is_quick_for_any_text(piece: str) -> None:
    styles: tuple[Any, ...] = ("boxed", "answer_tag", "hashes", "think_answer")
    with within_seconds():
        for style in styles:
            has_format(piece * 30_000, FormatOptions(style=style))


def test_a_pattern_matches_the_whole_completion() -> None:
    reward = FormatReward(FormatOptions(style="regex", pattern=r"(?s).+\nAnswer: \d+", example="so\nAnswer: 7"))
    texts = ["3 + 4\nAnswer: 7\n", "3 + 4\nAnswer: seven", "Answer: 7", "3\nAnswer: 7 or so", ""]
    values = [score.value for score in reward([make_rollout(text) for text in texts])]
    reward.close()
    assert values == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_a_pattern_that_backtracks_for_ever_is_cut_off_and_the_next_completions_are_judged() -> None:
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


TEXTS = {row["language"]: row["text"] for row in rows_of(__file__, "languages")}


def value(text: str, **options: object) -> float | None:
    return language_reward(LanguageOptions(**options))([make_rollout(text)])[0].value  # type: ignore[arg-type]


@pytest.mark.parametrize("language", sorted(SCRIPTS))
def test_a_text_in_the_wanted_language_scores_one(language: str) -> None:
    assert value(TEXTS[language], language=language) == 1.0


@pytest.mark.parametrize("language", sorted(STOP_WORDS))
def test_a_text_in_another_language_of_the_same_script_scores_what_is_set(language: str) -> None:
    others = [other for other in sorted(STOP_WORDS) if other != language]
    values = {other: value(TEXTS[other], language=language, other_language=0.25) for other in others}
    assert values == dict.fromkeys(others, 0.25)


def test_the_score_is_the_share_of_letters_of_the_script() -> None:
    """Six Latin letters and two Cyrillic ones: 6/8. Digits, signs and LaTeX commands do not count."""
    assert value(r"answer да 12 + \frac{1}{2}", language="en") == 0.75
    assert value("12 + 5 = 17", language="en") == 1.0
    assert value(TEXTS["zh"], language="en") == 0.0


@pytest.mark.parametrize("text", ["", " \n", "\u200b\ufeff", "\u3164", "\u2800\u00ad"])
def test_a_text_that_shows_nothing_scores_nothing(text: str) -> None:
    assert value(text, language="en") == 0.0
    assert value(text) == 0.0


def test_a_short_text_is_judged_by_its_script_alone() -> None:
    assert value("und nicht", language="en") == 1.0
    assert value("und nicht", language="en", min_words=2) == 0.0


def test_with_prompt_the_script_of_the_question_is_wanted() -> None:
    def answered(question: str, answer: str) -> float | None:
        rollout = make_rollout(answer)
        turns = (Message(role="system", content="Отвечай."), Message(role="user", content=question))
        asked = dataclasses.replace(rollout, prompt=dataclasses.replace(rollout.prompt, messages=turns))
        return language_reward(LanguageOptions())([asked])[0].value

    assert answered("What is 3 + 4?", "It is seven.") == 1.0
    assert answered("What is 3 + 4?", TEXTS["zh"]) == 0.0
    assert answered(TEXTS["ja"], "七です") == 1.0
    assert answered("3 + 4 = ?", TEXTS["ru"]) == 1.0  # a question without letters asks for no script


def test_no_word_is_common_in_two_of_the_languages() -> None:
    shared = {(a, b): STOP_WORDS[a] & STOP_WORDS[b] for a, b in combinations(STOP_WORDS, 2)}
    assert {pair: words for pair, words in shared.items() if words} == {}


@pytest.mark.parametrize(
    ("length", "penalty"),
    # limit 20, buffer 8: the penalty starts after 12 tokens; (12 - 16) / 8 = -0.5
    [(0, 0.0), (12, 0.0), (13, -0.125), (16, -0.5), (19, -0.875), (20, -1.0), (21, -1.0), (1000, -1.0)],
)
def test_the_penalty_of_dapo_equation_13(length: int, penalty: float) -> None:
    assert overlong_penalty(length, limit=20, buffer=8) == penalty


def test_only_tokens_of_the_policy_are_counted() -> None:
    reward = length_reward(LengthOptions(limit=4, buffer=2))
    whole = make_rollout("some text", num_tokens=4)
    with_tool_output = dataclasses.replace(whole, loss_mask=(True, False, False, True))
    assert [score.value for score in reward([whole, with_tool_output])] == [-1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "ngram", "penalty"),
    [
        ("a b a b a b", 2, -0.6),  # ab ba ab ba ab: 2 of 5
        ("a b c d e f", 2, 0.0),
        ("a a a a a", 1, -0.8),  # 1 of 5
        ("a a a a a", 4, -0.5),  # aaaa aaaa: 1 of 2
        ("a a a a", 4, 0.0),
        ("", 1, 0.0),
    ],
)
def test_the_penalty_counts_distinct_pieces(text: str, ngram: int, penalty: float) -> None:
    assert repetition_penalty(text.split(), ngram=ngram) == pytest.approx(penalty)


def test_the_reward_of_the_environment_is_taken_and_without_one_nothing_is_scored() -> None:
    rollouts = [dataclasses.replace(make_rollout(""), environment_reward=value) for value in (0.5, None)]
    reward = build_rewards([RewardTerm(kind="environment", weight=2.0)], resources=RewardResources())
    worth, silent = reward(rollouts)
    assert (worth.value, dict(worth.terms)) == (1.0, {"environment": 0.5})
    assert (silent.value, silent.error) == (None, "environment: neither environment nor agent gave a reward")
