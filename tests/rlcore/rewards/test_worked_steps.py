"""Partial credit: only work that is true throughout and leads to the reference."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.errors import ConfigError
from rlcore.rewards.math_answer import MathOptions, MathReward, is_valid_derivation
from rlcore.types import Rollout
from tests.quick import within_seconds


@pytest.mark.parametrize(
    ("text", "sound"),
    [
        ("48/2 = 24, 48 + 24 = 72. #### 27", True),
        ("48/2 = <<48/2=24>>24 and 48+24 = <<48+24=72>>72", True),
        ("= 8*9 = 72", True),
        (r"8 \times 9 = 72", True),
        ("8 x 9 = 72", True),
        ("$36 + $36 = $72.", True),
        ("(3 + 5) * 9 = 8 * 9 = 72", True),
        ("7.2 * 10 = 72.0", True),
        ("72,000 / 1,000 = 72", True),
        ("I think that it is 72", False),
        ("72", False),
        ("x = 72", False),
        ("1+71 = 72, 1+72 = 73", False),  # only the last equation counts: no list of numbers helps
        ("48/2 = 25, 48 + 24 = 72", False),  # a false step
        ("48 + 24 = 27", False),
        ("1/0 = 72", False),
        ("216/3.0001 = 72", False),
        ("2**6 + 8 = 72", False),  # powers are not evaluated: they may be huge
        ("", False),
    ],
)
def test_sound_work_is_true_throughout_and_ends_in_the_reference(text: str, sound: bool) -> None:
    assert is_valid_derivation(text, Fraction(72)) is sound


@given(st.text(alphabet="0123456789.+*/()= -x,$", max_size=80))
def test_any_text_is_judged_without_an_exception(text: str) -> None:
    assert is_valid_derivation(text, Fraction(1)) in (True, False)


@pytest.mark.parametrize("piece", ["1+", "(", "1=", "9*", "1 x ", "-", "1,000", "=" * 3 + "1"])
def test_judging_is_quick_for_any_text(piece: str) -> None:
    with within_seconds():
        is_valid_derivation(piece * (20_000 // len(piece)), Fraction(1))


def test_partial_credit_goes_to_sound_work_alone_and_only_when_asked(make_rollout: Callable[..., Rollout]) -> None:
    texts = ["48+24 = 72\n#### 72", "48+24 = 72\n#### 27", "48+24 = 27\n#### 27", "#### 27"]
    rollouts = [make_rollout(text, "72") for text in texts]
    assert [score.value for score in MathReward(MathOptions(partial=0.5))(rollouts)] == [1.0, 0.5, 0.0, 0.0]
    assert [score.value for score in MathReward()(rollouts)] == [1.0, 0.0, 0.0, 0.0]


def test_partial_credit_may_not_count_as_correct() -> None:
    with pytest.raises(ConfigError, match=r"must be below 0\.99"):
        MathOptions(partial=1.0)
