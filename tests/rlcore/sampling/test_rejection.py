"""Choice of the answers that become demonstrations, and of prompts by their pass rate."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.config import RejectionConfig, SamplingConfig
from rlcore.sampling.rejection import (
    REASONS,
    Candidate,
    PassCount,
    is_verified,
    learnability,
    normalised,
    repeat_counts,
    sample_by_difficulty,
    select,
    summarize,
)
from rlcore.types import CORRECT_FROM


def config(**settings: Any) -> RejectionConfig:
    required = {"num_samples": 4, "rewards": (), "sampling": SamplingConfig(max_new_tokens=8)}
    return RejectionConfig(**(required | settings))


def answers(prompt_id: str, *values: float | None, task: str = "sums", **fields: Any) -> list[Candidate]:
    """An answer with a text of its own for each value."""
    return [
        Candidate(
            **{
                "prompt_id": prompt_id,
                "task": task,
                "sample_index": place,
                "text": f"answer {place}",
                "num_tokens": 5,
                "value": value,
                "is_finished": True,
                "is_usable": True,
            }
            | fields
        )
        for place, value in enumerate(values)
    ]


def one(prompt_id: str, place: int, text: str, value: float = 1.0, num_tokens: int = 5) -> Candidate:
    fields = {"sample_index": place, "text": text, "num_tokens": num_tokens}
    return answers(prompt_id, value, **fields)[0]


def kept(candidates: list[Candidate], **settings: Any) -> list[tuple[str, int]]:
    return [(each.prompt_id, each.sample_index) for each in select(candidates, config(**settings), seed=0).kept]


def dropped(candidates: list[Candidate], **settings: Any) -> dict[str, int]:
    found = select(candidates, config(**settings), seed=0).dropped
    return {reason: count for reason, count in found.items() if count}


def test_verified_is_correct_unless_a_preset_sets_another() -> None:
    assert config().threshold == CORRECT_FROM


def test_the_first_verified_answer_to_each_prompt_is_kept() -> None:
    candidates = answers("a", 0.0, 1.0, 1.0) + answers("b", 0.0, 0.5, 0.98) + answers("c", 0.99)
    assert kept(candidates) == [("a", 1), ("c", 0)]
    assert dropped(candidates) == {"below_threshold": 4, "over_prompt_cap": 1}
    assert kept(candidates, threshold=0.5, keep_per_prompt=2) == [("a", 1), ("a", 2), ("b", 1), ("b", 2), ("c", 0)]


def test_best_of_n_keeps_the_highest_value_whatever_it_is() -> None:
    candidates = answers("a", -3.0, -1.0, -2.0) + answers("b", 0.2, None)
    assert kept(candidates, choose="best") == [("a", 1), ("b", 0)]
    assert kept(candidates, choose="best", keep_per_prompt=2) == [("a", 1), ("a", 2), ("b", 0)]
    assert dropped(candidates, choose="best") == {"unscored": 1, "over_prompt_cap": 2}


def test_the_shortest_correct_answer_may_be_preferred_but_never_to_a_better_one() -> None:
    candidates = [one("a", 0, "x y z", num_tokens=9), one("a", 1, "z", num_tokens=3), one("a", 2, "w", num_tokens=3)]
    assert kept(candidates) == [("a", 0)]
    assert kept(candidates, prefer="shortest") == [("a", 1)]
    better = [*candidates, one("a", 3, "long", value=2.0, num_tokens=20)]
    assert kept(better, prefer="shortest", choose="best") == [("a", 3)]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"is_finished": False}, "truncated"), ({"is_usable": False}, "unusable"), ({"value": None}, "unscored")],
)
def test_what_cannot_be_a_demonstration_is_not_kept_however_it_is_chosen(fields: dict[str, Any], reason: str) -> None:
    broken = [Candidate(**({"prompt_id": "a", "task": "t", "sample_index": 0, "text": "x", "num_tokens": 1,
                            "value": 1.0, "is_finished": True, "is_usable": True} | fields))]  # fmt: skip
    for choose in ("verified", "best"):
        assert kept(broken, choose=choose) == []
        assert dropped(broken, choose=choose) == {reason: 1}


def test_an_answer_that_differs_in_white_space_alone_is_a_duplicate_for_its_own_prompt() -> None:
    same = [
        one("a", 0, "1+1=2;\n#### 2"),
        one("a", 1, " 1+1=2;  #### 2\n"),
        one("a", 2, "#### 2"),
        one("b", 0, "#### 2"),
    ]
    assert kept(same, keep_per_prompt=3) == [("a", 0), ("a", 2), ("b", 0)]
    assert dropped(same, keep_per_prompt=3) == {"duplicate": 1}
    assert normalised(" 1+1=2;  #### 2\n") == "1+1=2; #### 2"


def test_a_task_that_is_easy_cannot_crowd_out_the_others() -> None:
    easy = [each for name in "abcd" for each in answers(name, 1.0, 1.0, task="easy")]
    hard = answers("e", 0.0, 1.0, task="hard")
    found = kept(easy + hard, keep_per_prompt=2, keep_per_task=3)
    assert len(found) == 4
    assert ("e", 1) in found
    prompts = [prompt for prompt, _ in found if prompt != "e"]
    assert len(set(prompts)) == 3  # the prompts take turns: one answer of each before a second of any
    assert dropped(easy + hard, keep_per_prompt=2, keep_per_task=3) == {"below_threshold": 1, "over_task_cap": 5}


def test_where_a_task_is_full_a_prompt_keeps_its_best_answer_and_not_its_first() -> None:
    candidates = answers("a", 0.5, 1.0) + answers("b", 0.2, 0.9)
    assert kept(candidates, choose="best", keep_per_prompt=2, keep_per_task=2) == [("a", 1), ("b", 1)]
    three = kept(candidates, choose="best", keep_per_prompt=2, keep_per_task=3)
    assert {("a", 1), ("b", 1)} < set(three)
    short = [one("a", 0, "long", num_tokens=9), one("a", 1, "short", num_tokens=2)]
    assert kept(short, prefer="shortest", keep_per_prompt=2, keep_per_task=1) == [("a", 1)]


def test_the_seed_alone_decides_which_prompts_a_task_cap_leaves() -> None:
    candidates = [each for name in "abcdefgh" for each in answers(name, 1.0)]
    chosen = {seed: select(candidates, config(keep_per_task=3), seed=seed).kept for seed in range(8)}
    assert chosen[0] == select(candidates, config(keep_per_task=3), seed=0).kept
    assert len(set(chosen.values())) > 1
    reversed_order = select(candidates[::-1], config(keep_per_task=3), seed=0).kept
    assert set(reversed_order) == set(chosen[0])


values = st.none() | st.sampled_from([0.0, 0.5, 1.0])


@given(
    groups=st.lists(st.lists(st.tuples(values, st.sampled_from(["x", "y ", "y", "z w"]), st.booleans()), max_size=6)),
    choose=st.sampled_from(["verified", "best"]),
    prompt_cap=st.integers(1, 3),
    task_cap=st.integers(0, 4),
)
def test_every_answer_is_kept_or_has_a_reason_and_the_caps_hold(
    groups: list[list[tuple[float | None, str, bool]]], choose: str, prompt_cap: int, task_cap: int
) -> None:
    candidates = [
        Candidate(prompt_id=str(number), task=str(number % 2), sample_index=place, text=text, num_tokens=1,
                  value=value, is_finished=whole, is_usable=True)
        for number, group in enumerate(groups)
        for place, (value, text, whole) in enumerate(group)
    ]  # fmt: skip
    rule = config(choose=choose, keep_per_prompt=prompt_cap, keep_per_task=task_cap)
    selection = select(candidates, rule, seed=3)
    assert len(selection.kept) + sum(selection.dropped.values()) == len(candidates)
    assert tuple(selection.dropped) == REASONS
    assert list(selection.kept) == [each for each in candidates if each in set(selection.kept)]
    assert all(each.is_finished and each.value is not None for each in selection.kept)
    assert choose == "best" or all(is_verified(each, rule) for each in selection.kept)
    for prompt in {each.prompt_id for each in selection.kept}:
        texts = [normalised(each.text) for each in selection.kept if each.prompt_id == prompt]
        assert len(texts) == len(set(texts)) <= prompt_cap
    for prompt in {each.prompt_id for each in selection.kept}:
        worst = min(each.value or 0.0 for each in selection.kept if each.prompt_id == prompt)
        texts = {normalised(each.text) for each in selection.kept if each.prompt_id == prompt}
        better = [
            each
            for each in candidates
            if each.prompt_id == prompt and each.is_finished and (each.value or 0.0) > worst
            and normalised(each.text) not in texts
        ]  # fmt: skip
        assert choose == "verified" or not better  # no worse answer in the place of a better one
    for task in ("0", "1"):
        assert not task_cap or sum(each.task == task for each in selection.kept) <= task_cap


def test_the_account_counts_answers_and_weighs_every_prompt_alike() -> None:
    # shares of verified answers 2/2, 1/4, 0/1: mean 0.41667 (over answers it would be 3/7); two of three prompts solved
    candidates = answers("a", 1.0, 1.0) + answers("b", 0.0, 1.0, 0.0, None) + answers("c", 0.5)
    found = summarize(candidates, select(candidates, config(), seed=0).kept, config(), seed=0)
    assert (found.num_prompts, found.sampled, found.verified, found.kept) == (3, 7, 3, 2)
    assert found.pass_rate.mean == pytest.approx(5 / 12)
    assert found.pass_rate.low < 5 / 12 < found.pass_rate.high
    surer = summarize(candidates, [], config(), seed=0, confidence=0.99)
    assert surer.pass_rate.low < found.pass_rate.low and surer.solved.high > found.solved.high
    assert found.solved.mean == pytest.approx(2 / 3)


ANSWERS = 8

tried = st.integers(1, 64).flatmap(lambda n: st.integers(0, n).map(lambda k: PassCount(passed=k, answers=n)))

weights = st.lists(tried.map(learnability), min_size=1, max_size=40)


def test_learnability_is_the_mean_of_the_variance_over_the_posterior() -> None:
    # 8 answers, 4 right: Beta(5, 5), 5 * 5 / (10 * 11); none right: Beta(1, 9), 1 * 9 / (10 * 11)
    assert learnability(PassCount(passed=4, answers=8)) == Fraction(25, 110)
    assert learnability(PassCount(passed=0, answers=8)) == Fraction(9, 110)
    # by quadrature: the mean of p(1 - p) under p^6 (1 - p)^2, normalised
    grid = [(place + 0.5) / 20_000 for place in range(20_000)]
    density = [p**6 * (1 - p) ** 2 for p in grid]
    mean = sum(d * p * (1 - p) for d, p in zip(density, grid, strict=True)) / sum(density)
    assert float(learnability(PassCount(passed=6, answers=8))) == pytest.approx(mean, rel=1e-6)


@given(tried)
def test_learnability_is_the_same_for_right_and_wrong_and_highest_in_the_middle(one: PassCount) -> None:
    other = PassCount(passed=one.answers - one.passed, answers=one.answers)
    assert learnability(one) == learnability(other)
    assert (
        0 < learnability(one) <= learnability(PassCount(passed=one.answers // 2, answers=one.answers)) < Fraction(1, 4)
    )


@given(weights, st.integers(0, 2**40))
def test_every_item_comes_as_often_as_its_weight_says_up_to_one(given_weights: list[Fraction], seed: int) -> None:
    counts = repeat_counts(given_weights, seed=seed)
    ratios = [weight / min(given_weights) for weight in given_weights]
    assert all(abs(count - ratio) < 1 for count, ratio in zip(counts, ratios, strict=True))
    assert min(counts) >= 1
    assert abs(sum(counts) - sum(ratios)) < 1
    assert repeat_counts(given_weights, seed=seed) == counts


def test_over_seeds_the_mean_is_the_ratio() -> None:
    found = [repeat_counts([Fraction(9), Fraction(16), Fraction(25)], seed=seed) for seed in range(2_000)]
    means = [sum(each[place] for each in found) / len(found) for place in range(3)]
    # 1, 16 / 9 and 25 / 9; a standard error is at most 0.5 / sqrt(2000) = 0.011
    assert means == pytest.approx([1.0, 16 / 9, 25 / 9], abs=0.05)


@given(st.lists(st.none() | tried, max_size=30), st.floats(0, 1), st.floats(0, 1), st.integers(0, 9))
def test_what_is_drawn_is_known_and_in_the_band_and_keeps_its_order(
    known: list[PassCount | None], one: float, other: float, seed: int
) -> None:
    low, high = min(one, other), max(one, other)
    items = list(range(len(known)))
    inside = [place for place, each in enumerate(known) if each is not None and low <= each.pass_rate <= high]
    even = sample_by_difficulty(items, known, band=(low, high), weight="even", seed=seed)
    learnable = sample_by_difficulty(items, known, band=(low, high), weight="learnability", seed=seed)
    assert even == inside
    assert learnable == sorted(learnable)
    assert list(Counter(learnable)) == inside


def test_an_item_that_is_solved_half_the_time_comes_more_often_than_one_that_never_is() -> None:
    known = [PassCount(passed=passed, answers=ANSWERS) for passed in (0, 4)] * 90
    counts = Counter(
        place % 2 for place in sample_by_difficulty(range(180), known, band=(0, 1), weight="learnability", seed=3)
    )
    assert (counts[0], counts[1]) == (90, 250)  # 25 / 9 as often
