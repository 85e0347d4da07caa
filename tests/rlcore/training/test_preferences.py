"""Sets of preferences: each completion once, each set once, and cuts that lose no comparison."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.training.preferences import PreferenceSet, TokenPair, microbatches, preference_sets


def ranking(prompt: int, lengths: list[int], *, set_id: str = "s", weight: float = 1.0) -> list[TokenPair]:
    """All pairs of a ranking without ties; completion k holds the token k, ``lengths[k]`` times."""
    texts = [(number,) * length for number, length in enumerate(lengths)]
    return [
        TokenPair(set_id=set_id, prompt_ids=(prompt,), chosen_ids=better, rejected_ids=worse, weight=weight)
        for better, worse in combinations(texts, 2)
    ]


def test_a_ranking_of_four_has_six_comparisons_of_four_completions() -> None:
    # 4 * 3 / 2 = 6 pairs, which share the weight 0.5 of the set: 1/12 each.
    (one,) = preference_sets(ranking(9, [1, 2, 3, 4], weight=0.5))
    assert one.completions == ((0,), (1, 1), (2, 2, 2), (3, 3, 3, 3))
    assert [(each.better, each.worse) for each in one.comparisons] == list(combinations(range(4), 2))
    assert [each.weight for each in one.comparisons] == [pytest.approx(1 / 12)] * 6
    assert one.num_tokens == 1 + 10


def test_a_set_of_which_pairs_went_missing_still_counts_once() -> None:
    pairs = ranking(9, [1, 1, 1], set_id="a")[:2] + ranking(8, [1, 1], set_id="b")
    assert [sum(each.weight for each in one.comparisons) for one in preference_sets(pairs)] == [1.0, 1.0]


def test_pairs_of_one_prompt_that_were_judged_apart_stay_apart() -> None:
    assert len(preference_sets(ranking(9, [1, 2], set_id="a") + ranking(9, [1, 3], set_id="b"))) == 2


def judged(sets: list[PreferenceSet]) -> list[tuple[object, ...]]:
    """Every comparison with its completions spelled out."""
    return sorted(
        (one.prompt_ids, one.completions[each.better], one.completions[each.worse], each.weight)
        for one in sets
        for each in one.comparisons
    )


@given(st.lists(st.lists(st.integers(1, 9), min_size=2, max_size=5), min_size=1, max_size=5), st.integers(1, 60))
def test_micro_batches_keep_every_comparison_and_the_budget(shapes: list[list[int]], budget: int) -> None:
    sets = preference_sets([p for n, shape in enumerate(shapes) for p in ranking(n, shape, set_id=str(n))])
    cut = microbatches(sets, budget)
    assert judged([piece for micro in cut for piece in micro]) == judged(sets)
    for micro in cut:
        fits = micro[0].num_tokens * len(micro) <= budget
        assert fits or (len(micro) == 1 and len(micro[0].comparisons) == 1)  # one pair is the least there is
