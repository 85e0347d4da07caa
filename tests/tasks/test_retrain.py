"""What retraining asks of the past, and the gate of the reward model on margins made by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlcore.config import RetrainConfig
from rlcore.errors import DataError
from rlcore.types import Message
from tasks.data import PairRow
from tasks.lineage import Ancestor
from tasks.retrain import nearest, recipe_of
from tasks.retrain_reward import _unseen, _verdict, compared, render
from tasks.settings import Home
from tasks.storage import write_json


def node(stage: str, sha256: str, *parents: Ancestor) -> Ancestor:
    return Ancestor(stage=stage, sha256=sha256, facts=(), parents=parents)


def test_the_nearest_result_of_each_stage_counts() -> None:
    old = node(
        "grpo", "g1", node("prepare_prompts", "p1"), node("reward_model", "r1", node("prepare_preferences", "d1"))
    )
    new = node("grpo", "g2", node("champion", "c1", old), node("reward_model", "r2", node("prepare_preferences", "d2")))
    assert nearest(new) == {
        "grpo": "g2",
        "champion": "c1",
        "reward_model": "r2",
        "prepare_preferences": "d2",
        "prepare_prompts": "p1",
    }


def test_a_recipe_is_all_but_the_start_and_data_count_by_their_rows(home: Home) -> None:
    for name, digest in (("s1", "d1"), ("s2", "d1"), ("s3", "d3")):
        folder = home.artifacts / "dataset" / name
        folder.mkdir(parents=True)
        write_json({"digest": digest}, folder / "report.json")

    def recipe(data: str, start: str, start_sha: str, seed: int = 0) -> str:
        inputs = {start: start_sha, "prepare_prompts": data, "reward_model": "r"}
        return recipe_of(home, {"arguments": {"start": start, "section": "grpo"}, "inputs": inputs, "seed": seed})

    first = recipe("s1", "sft", "x")
    assert recipe("s1", "champion", "y") == first
    assert recipe("s2", "champion", "z") == first
    assert recipe("s3", "champion", "z") != first
    assert recipe("s1", "champion", "y", seed=1) != first
    assert recipe("gone", "sft", "x") != first


def test_a_reward_model_must_reach_its_accuracy_agree_with_the_last_and_not_lose_to_it() -> None:
    settings = RetrainConfig(min_accuracy=0.8, min_agreement=0.8, accuracy_margin=0.05)
    right = np.ones(100)
    passed = compared([right, right], settings, seed=0)
    assert [check.passed for check in passed] == [True, True, True]
    # Wilson at 95 %, 100 of 100: low = 1 / (1 + 1.96² / 100) = 0.963.
    assert passed[0].low == pytest.approx(0.963, abs=5e-4)
    wrong = right.copy()
    wrong[:30] = -1.0
    lost = compared([wrong, right], settings, seed=0)
    assert [check.passed for check in lost] == [False, False, False]
    assert lost[2].estimate == pytest.approx(-0.3)
    other = np.concatenate([-right[:50], right[50:]]), np.concatenate([right[:50], -right[50:]])
    apart = compared(list(other), RetrainConfig(min_accuracy=0.3, accuracy_margin=0.5), seed=0)
    assert [check.passed for check in apart] == [True, False, True]  # as accurate, and of another opinion
    assert len(compared([right], settings, seed=0)) == 1


def row(name: str) -> PairRow:
    return PairRow(
        pair_id=name,
        set_id=name,
        messages=(Message(role="user", content=f"question {name}"),),
        chosen=f"good {name}",
        rejected="bad | worse",
        margin=0.0,
        probability=1.0,
        weight=1.0,
        source="test",
    )


def test_the_page_shows_the_pairs_on_which_the_two_disagree_the_furthest_apart_first() -> None:
    settings = RetrainConfig()
    new, old = np.array([1.0, -2.0, 1.0, -0.5]), np.array([1.0, 2.0, 1.0, 0.5])
    rows = [row(name) for name in "abcd"]
    page = render(_verdict(compared([new, old], settings, seed=0), settings), rows, [new, old], is_same=False)
    assert page.index("| b | good b | bad \\| worse | -2.00 | +2.00 |") < page.index("| d | good d")
    assert "2 of 4." in page
    assert "| a |" not in page


def test_without_a_snapshot_of_the_past_every_held_out_pair_counts(tmp_path: Path) -> None:
    rows = [row("a"), row("b")]
    assert _unseen(rows, tmp_path / "gone") == rows
    with pytest.raises(DataError, match="every held-out pair"):
        _unseen([], tmp_path / "gone")
