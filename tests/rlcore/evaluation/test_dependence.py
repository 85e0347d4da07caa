"""Judges that err where the reward model does, and judges that do not."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from rlcore.config import JudgeBounds
from rlcore.errors import DataError
from rlcore.evaluation.dependence import dependence
from rlcore.evaluation.win_rate import Floats
from tests.rlcore.evaluation.test_win_rate import NAN, verdicts

Bools = NDArray[np.bool_]


def excess(own: Floats, other: Floats) -> float:
    return dependence(verdicts(own, own), verdicts(other, other), np.arange(len(own)), seed=0).excess.mean


def test_dependence_of_judge_and_reward_model_by_hand() -> None:
    # Of 10 pairs the judge errs on 2 and the reward model on 4: independent errors disagree on .8 * .4 + .6 * .2 = .44.
    judge, both, apart = (np.ones(10) for _ in range(3))
    judge[:2], both[:4], apart[2:6] = 0.0, 0.0, 0.0
    assert excess(judge, both) == pytest.approx(1.0 - 0.2 / 0.44)  # they disagree on two pairs
    assert excess(judge, apart) == pytest.approx(1.0 - 0.6 / 0.44)  # and on six
    assert excess(judge, judge) == 1.0
    assert excess(np.ones(10), np.ones(10)) == 0.0  # no error is in common
    found = dependence(verdicts(judge, judge), verdicts(both, both), np.arange(10), seed=0)
    assert found.agreement.mean == 0.8
    with pytest.raises(DataError, match="no human pair has a result of both"):
        excess(np.full(3, NAN), np.ones(3))


def test_a_twin_is_above_the_bound_and_an_independent_judge_below_even_if_labels_are_noisy() -> None:
    # A quarter of the labels is wrong, for both models: each agrees with the truth on 0.85 of the pairs, and with the
    # labels on a = 0.675. They disagree on 2 * .85 * .15 = .255; independent errors would on 2 a (1 - a) = .439: 0.42.
    generator, limit, pairs = np.random.default_rng(0), JudgeBounds().max_dependence, (40, 500)
    label = generator.random(pairs) > 0.25
    right, other = (generator.random(pairs) < 0.85 for _ in range(2))
    twin = right ^ (generator.random(pairs) < 0.01)

    def above(model: Bools) -> int:
        both = zip((right == label).astype(float), (model == label).astype(float), strict=True)
        return sum(excess(*each) > limit for each in both)

    assert above(twin) == 40
    assert above(other) <= 1
