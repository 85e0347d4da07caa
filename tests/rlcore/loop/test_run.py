"""Which prompts an iteration trains on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlcore.loop.run import window
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
