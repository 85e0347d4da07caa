"""AlpacaEval's parts: a policy and its judge share no training prompt, and both hold out the same."""

from __future__ import annotations

from collections import defaultdict

import pytest

from rlcore.data_contracts.adapters.table import ADAPTERS, Adapter
from rlcore.data_contracts.adapters.targets import Kind
from rlcore.data_contracts.errors import LeftOutError
from rlcore.examples.instructions import JUDGE, PARTS, POLICY, part_of

ROWS = [
    {"id": f"{n}", "prompt": f"Name {n} things.", "chosen": "a", "rejected": "b", "annotator": "me"} for n in range(120)
]


def sides(adapter: Adapter, kind: Kind) -> dict[str, set[str]]:
    """Return the questions of each side."""
    found = defaultdict(set)
    for row in ROWS:
        try:
            (made,) = adapter.rows[kind](row)
        except LeftOutError:
            continue
        found[made["split"]].add(made["messages"][-1]["content"])
    return found


@pytest.mark.parametrize("kind", ["prompts", "preferences"])
def test_training_prompts_differ_and_held_out_ones_are_the_same(kind: Kind) -> None:
    policy, judge = sides(POLICY, kind), sides(JUDGE, kind)
    assert policy["eval"] == judge["eval"]
    parts = [policy["eval"], policy["train"], judge["train"]]
    assert min(map(len, parts)) > 20
    assert sum(map(len, parts)) == len(set[str]().union(*parts)) == len(ROWS)


def test_all_but_the_split_is_as_the_layout_reads_it() -> None:
    row = next(row for row in ROWS if part_of(str(row["prompt"])) == "judge")
    (made,) = JUDGE.rows["preferences"](row)
    assert made == {**ADAPTERS["alpaca_eval"].rows["preferences"](row)[0], "split": "train"}


def test_a_prompt_in_another_spelling_is_in_the_same_part() -> None:
    assert {part_of(text) for text in ("Why is it so?", "why is it  so?", " Why\nis it so? ")} < set(PARTS)
    assert len({part_of(text) for text in ("Why is it so?", "why is it  so?", " Why\nis it so? ")}) == 1
