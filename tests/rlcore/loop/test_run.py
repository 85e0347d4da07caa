"""Which prompts an iteration trains on, of one data set and of several."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlcore.loop.run import cycle_of, mixed_by_shares, window, window_by_shares
from rlcore.types import Prompt


def prompts(count: int) -> list[Prompt]:
    return [Prompt(prompt_id=str(i), messages=(), token_ids=(i,), reference="", task="t") for i in range(count)]


@given(count=st.integers(1, 12), size=st.integers(1, 5), seed=st.integers(0, 99))
def test_every_epoch_shows_every_prompt_once_in_an_order_of_its_own(count: int, size: int, seed: int) -> None:
    total = 2 * count
    drawn = [p.prompt_id for start in range(0, total, size) for p in window(prompts(count), start, size, seed=seed)]
    assert sorted(drawn[:count]) == sorted(drawn[count : 2 * count]) == sorted(map(str, range(count)))


def test_a_window_depends_on_its_place_alone_so_a_resumed_run_sees_the_same_prompts() -> None:
    straight = [p.prompt_id for start in (0, 4, 8) for p in window(prompts(10), start, 4, seed=1)]
    assert [p.prompt_id for p in window(prompts(10), 8, 4, seed=1)] == straight[8:]


def of(name: str, count: int) -> list[Prompt]:
    return [
        Prompt(prompt_id=f"{name}/{i}", messages=(), token_ids=(i,), reference="", task="t", dataset=name)
        for i in range(count)
    ]


@given(weights=st.lists(st.integers(1, 9), min_size=2, max_size=4), start=st.integers(0, 2000))
def test_each_data_set_has_its_share_of_any_stretch_to_within_one_prompt(weights: list[int], start: int) -> None:
    shares = {f"d{place}": float(weight) for place, weight in enumerate(weights)}
    pool = [prompt for name in shares for prompt in of(name, 5)]
    drawn = [prompt.dataset for prompt in window_by_shares(pool, shares, start, 40, seed=0)]
    for name, share in shares.items():
        assert abs(drawn.count(name) - 40 * share / sum(weights)) <= 2.0


def test_a_data_set_in_a_mix_shows_every_prompt_once_an_epoch_wherever_a_run_goes_on() -> None:
    pool, shares = [*of("a", 6), *of("b", 3)], {"a": 3.0, "b": 1.0}
    straight = window_by_shares(pool, shares, 0, 24, seed=1)
    first, second = [[p.prompt_id for p in straight if p.dataset == "a"][i : i + 6] for i in (0, 6)]
    assert sorted(first) == sorted(second) == [f"a/{i}" for i in range(6)]
    assert first != second
    assert window_by_shares(pool, shares, 8, 8, seed=1) == straight[8:16]


def test_the_data_sets_of_a_mix_take_turns() -> None:
    """Shares of 2 to 1: a is furthest behind at first, then b, then a."""
    assert cycle_of((("a", 2.0), ("b", 1.0)))[:6] == ("a", "b", "a", "a", "b", "a")


def test_replacements_keep_the_shares_until_a_data_set_is_used_up() -> None:
    found = [prompt.dataset for prompt in mixed_by_shares([*of("a", 5), *of("b", 1)], {"a": 2.0, "b": 1.0})]
    assert found == ["a", "b", "a", "a", "a", "a"]
