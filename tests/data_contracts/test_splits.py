from __future__ import annotations

import hashlib

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_contracts.errors import ContractError
from data_contracts.splits import assign, held_out_prompts, is_held_out, select

HASHES = st.lists(st.sampled_from([hashlib.sha256(bytes([n])).hexdigest() for n in range(20)]), min_size=1, max_size=60)


def test_one_hash_in_ten_is_held_out() -> None:
    held = sum(is_held_out(hashlib.sha256(str(n).encode()).hexdigest()) for n in range(20_000))
    assert 1900 < held < 2100  # 2,000 expected, standard deviation 42


def test_the_smallest_hashes_are_held_out_and_reserved_prompts_before_them() -> None:
    hashes = ["d", "a", "b", "a", "c", "e"]
    assert held_out_prompts(hashes, num_train=4, num_eval=2) == {"a", "b"}
    assert held_out_prompts(hashes, num_train=4, num_eval=2, first=["e", "unknown"]) == {"a", "e"}
    assert held_out_prompts(hashes, num_train=4, num_eval=1, first=["d", "e"]) == {"d", "e"}


def test_a_source_that_is_too_small_is_shared_in_the_proportion_that_was_asked_for() -> None:
    # 10 prompts; 30 for training and 10 held out were asked for: a quarter, 10 * 10 // 40 = 2.
    assert held_out_prompts(list("abcdefghij"), num_train=30, num_eval=10) == {"a", "b"}


@given(HASHES, st.integers(1, 10), st.integers(1, 40))
def test_no_prompt_is_on_both_sides(hashes: list[str], num_eval: int, num_train: int) -> None:
    held = held_out_prompts(hashes, num_train=num_train, num_eval=num_eval)
    splits = assign([None] * len(hashes), hashes, held, where="")
    sides: dict[str, set[str]] = {}
    for digest, split in zip(hashes, splits, strict=True):
        sides.setdefault(digest, set()).add(split)
    assert all(len(side) == 1 for side in sides.values())


def test_a_split_of_the_source_is_kept_and_half_a_split_is_refused() -> None:
    assert assign(["train", "eval"], ["a", "b"], frozenset({"a"}), where="") == ["train", "eval"]
    with pytest.raises(ContractError, match="1 of 2 rows have no 'split'"):
        assign(["train", None], ["a", "b"], frozenset(), where="rows.jsonl")


def test_each_prompt_gives_one_row_before_any_gives_a_second() -> None:
    frame = pd.DataFrame({"name": list("abcdef"), "split": ["eval"] * 6})
    kept = select(frame, ["x", "x", "x", "y", "y", "z"], num_train=1, num_eval=4, seed=0)
    # Turns: a d f are first rows (x y z), b e second rows, c the third: four rows are a d f and b.
    assert kept["name"].tolist() == ["a", "b", "d", "f"]


def test_the_seed_chooses_training_prompts_and_never_evaluation_prompts() -> None:
    names = [hashlib.sha256(str(n).encode()).hexdigest() for n in range(40)]
    frame = pd.DataFrame({"name": names, "split": ["train", "eval"] * 20})
    first, second = (select(frame, names, num_train=5, num_eval=5, seed=seed) for seed in (0, 1))
    of = {
        split: [set(kept.loc[kept["split"] == split, "name"]) for kept in (first, second)] for split in frame["split"]
    }
    assert of["train"][0] != of["train"][1]
    assert of["eval"][0] == of["eval"][1]
    assert [len(side[0]) for side in of.values()] == [5, 5]
