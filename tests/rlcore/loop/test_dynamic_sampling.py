"""Dynamic sampling: whole groups, exactly-once accounting, and draws that depend on seed and iteration alone."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from rlcore.loop.prompt_schedule import SampledGroups, replace_groups, unused_prompts
from rlcore.types import Prompt

Group = tuple[int, bool]  # (number of the draw, whether it carries a signal)


class Source:
    """Numbers the groups that are asked for; ``signals`` says which of them carry one."""

    def __init__(self, signals: Sequence[bool]) -> None:
        self.signals = list(signals)
        self.asked: list[tuple[int, int]] = []
        self.given = 0

    def draw(self, number: int, count: int) -> list[Group]:
        self.asked.append((number, count))
        groups = [(self.given + i, signal) for i, signal in enumerate(self.signals[self.given : self.given + count])]
        self.given += len(groups)
        return groups


def run(first: Sequence[bool], later: Sequence[bool], *, max_rounds: int) -> tuple[SampledGroups[Group], Source]:
    """Groups of the batch have numbers from 100, later ones from 0."""
    source = Source(later)
    groups = [(100 + place, signal) for place, signal in enumerate(first)]
    return replace_groups(groups, source.draw, lambda group: group[1], max_rounds=max_rounds), source


def test_groups_without_signal_give_way_in_place_round_after_round() -> None:
    # Places 0 and 2 are empty; the first round brings an empty and a good group, the second a good one for place 0.
    drawn, source = run([False, True, False], [False, True, True], max_rounds=5)
    assert drawn.groups == ((2, True), (101, True), (1, True))
    assert drawn.replaced == ((100, False), (102, False), (0, False))
    assert source.asked == [(1, 2), (2, 1)]


def test_after_the_last_round_a_group_without_signal_stays() -> None:
    drawn, source = run([False, True], [False, True], max_rounds=1)
    assert drawn.groups == ((0, False), (101, True))
    assert drawn.replaced == ((100, False),)
    assert source.asked == [(1, 1)]


def test_without_rounds_nothing_is_drawn() -> None:
    drawn, source = run([False, False], [True, True], max_rounds=0)
    assert (drawn.groups, drawn.replaced, source.asked) == (((100, False), (101, False)), (), [])


def test_where_prompts_run_out_the_last_places_keep_their_groups_and_no_more_is_asked() -> None:
    drawn, source = run([False, False, False], [True], max_rounds=9)
    assert drawn.groups == ((0, True), (101, False), (102, False))
    assert source.asked == [(1, 3), (2, 2)]


@given(
    first=st.lists(st.booleans(), min_size=1, max_size=6),
    later=st.lists(st.booleans(), max_size=12),
    max_rounds=st.integers(0, 4),
)
def test_every_group_that_was_sampled_is_trained_on_or_replaced_and_never_both(
    first: list[bool], later: list[bool], max_rounds: int
) -> None:
    drawn, source = run(first, later, max_rounds=max_rounds)
    numbers = sorted(number for number, _ in (*drawn.groups, *drawn.replaced))
    assert numbers == sorted([*range(source.given), *range(100, 100 + len(first))])
    assert len(drawn.groups) == len(first)
    assert not any(signal for _, signal in drawn.replaced)
    assert all(group == (100 + place, True) for place, group in enumerate(drawn.groups) if first[place])
    assert [number for number, _ in source.asked] == list(range(1, len(source.asked) + 1))
    assert len(source.asked) <= max_rounds


def prompts(count: int) -> list[Prompt]:
    return [Prompt(prompt_id=str(i), messages=(), token_ids=(i,), reference="", task="t") for i in range(count)]


@given(count=st.integers(1, 12), taken=st.integers(0, 12), seed=st.integers(0, 99), iteration=st.integers(1, 50))
def test_fresh_prompts_are_all_that_the_iteration_has_not_used_each_once(
    count: int, taken: int, seed: int, iteration: int
) -> None:
    used = {str(i) for i in range(taken)}
    fresh = unused_prompts(prompts(count), used, seed=seed, iteration=iteration)
    assert sorted(int(prompt.prompt_id) for prompt in fresh) == list(range(min(taken, count), count))
    assert fresh == unused_prompts(prompts(count), used, seed=seed, iteration=iteration)


def test_the_order_of_fresh_prompts_is_of_its_seed_and_its_iteration() -> None:
    orders = {
        tuple(p.prompt_id for p in unused_prompts(prompts(20), (), seed=seed, iteration=iteration))
        for seed in (0, 1)
        for iteration in (1, 2)
    }
    assert len(orders) == 4
