"""The repetition penalty: 0 where nothing repeats, toward -1 where everything does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.rewards.repetition import RepetitionOptions, RepetitionReward, repetition_penalty
from rlcore.types import Rollout


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


@given(st.lists(st.sampled_from("abc"), max_size=40), st.integers(1, 6))
def test_the_penalty_is_bounded_and_saying_it_all_twice_never_helps(words: list[str], ngram: int) -> None:
    assert -1.0 < repetition_penalty(words * 2, ngram=ngram) <= 0.0
    assert repetition_penalty(words * 8, ngram=ngram) <= repetition_penalty(words * 2, ngram=ngram) + 1e-12


@pytest.mark.parametrize("text", ["", " ", "\u200b", "\u200b \u200b"])
def test_a_text_that_shows_nothing_is_the_worst(make_rollout: Callable[..., Rollout], text: str) -> None:
    assert RepetitionReward(RepetitionOptions())([make_rollout(text)])[0].value == -1.0


def test_the_reward_has_its_part(make_rollout: Callable[..., Rollout]) -> None:
    scores = RepetitionReward(RepetitionOptions(ngram=1))([make_rollout("no no"), make_rollout("oh no")])
    assert [score.terms for score in scores] == [{"repetition": -0.5}, {"repetition": 0.0}]
