"""The gate of the reward model on margins made by hand, and its page."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from rlcore.errors import DataError, NonFiniteError, StorageError
from rlcore.tasks.kinds.reward_gate.page import render
from rlcore.tasks.kinds.reward_gate.step import _champions_own, _decision, _unseen, compared, margins_table
from rlcore.tasks.presets.settings import RetrainConfig
from rlcore.tasks.steps.prompt_hashes import prompt_hashes
from rlcore.tasks.steps.rows import PairRow
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import write_table
from rlcore.tasks.tracking.past import SEEN_DIGITS
from rlcore.types import Message


def test_a_reward_model_must_reach_its_accuracy_agree_with_the_last_and_not_lose_to_it() -> None:
    settings = RetrainConfig(min_accuracy=0.8, min_agreement=0.8, accuracy_margin=0.05)
    right, each = np.ones(100), range(100)
    passed = compared([right, right], each, settings)
    assert [check.passed for check in passed] == [True, True, True]
    # Clopper and Pearson at 95 %, 100 of 100: low = 0.025^(1/100) = 0.9638.
    assert passed[0].low == pytest.approx(0.9638, abs=5e-5)
    wrong = right.copy()
    wrong[:30] = -1.0
    lost = compared([wrong, right], each, settings)
    assert [check.passed for check in lost] == [False, False, False]
    assert lost[2].estimate == pytest.approx(-0.3)
    other = np.concatenate([-right[:50], right[50:]]), np.concatenate([right[:50], -right[50:]])
    apart = compared(list(other), each, RetrainConfig(min_accuracy=0.3, accuracy_margin=0.5))
    assert [check.passed for check in apart] == [True, False, True]  # as accurate, and of another opinion
    assert len(compared([right], each, settings)) == 1


def test_a_few_equal_pairs_rule_no_loss_out_and_the_page_says_how_many_would() -> None:
    loss = compared([np.ones(5), np.ones(5)], range(5), RetrainConfig(accuracy_margin=0.05))[2]
    assert not loss.passed
    assert loss.low == pytest.approx(-0.434, abs=1e-3)  # z² / (n + z²)
    assert loss.sentence.endswith("not enough pairs: at least 72 are needed")


def test_pairs_of_one_ranked_list_are_no_proof_by_their_number() -> None:
    """600 pairs of 100 prompts, none different: nobody knows whether the six of a prompt go together, so 100 count."""
    settings = RetrainConfig(accuracy_margin=0.02)
    prompts = np.repeat(np.arange(100), 6).tolist()
    assert compared([np.ones(600)] * 2, range(600), settings)[2].passed
    assert not compared([np.ones(600)] * 2, prompts, settings)[2].passed


def test_a_tie_that_was_right_is_lost_and_one_that_was_wrong_is_not_won() -> None:
    new, old = np.array([0.0, 0.0, 1.0, -1.0, 0.0]), np.array([1.0, -1.0, -1.0, 1.0, 0.0])
    # lost: the first and the fourth; won: the third. The constant model is no better than its ties.
    assert compared([new, old], range(5), RetrainConfig())[2].estimate == pytest.approx(-1 / 5)


@pytest.mark.parametrize(("num_prompts", "together"), [(100, 1), (100, 4)])
def test_a_loss_of_exactly_the_margin_passes_no_more_often_than_the_level(num_prompts: int, together: int) -> None:
    """5 % of the pairs are won and 10 % lost, where the margin is 5 points: 2.5 % of the tries may pass.

    Pairs of one prompt share their outcome in half of the prompts.
    """
    generator, settings = np.random.default_rng(0), RetrainConfig(accuracy_margin=0.05)
    prompts, tries, passed = np.repeat(np.arange(num_prompts), together).tolist(), 500, 0
    for _ in range(tries):
        one, own = generator.random((num_prompts, 1)), generator.random((num_prompts, together))
        place = np.where(generator.random((num_prompts, 1)) < 0.5, one, own).ravel()
        new, old = np.where(place < 0.1, -1.0, 1.0), np.where((place >= 0.1) & (place < 0.15), -1.0, 1.0)
        passed += compared([new, old], prompts, settings)[2].passed
    assert passed / tries < 0.025 + 2.6 * (0.025 * 0.975 / tries) ** 0.5  # a right level fails here once in 200


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
    page = render(
        _decision(compared([new, old], range(4), settings), settings), margins_table(rows, [new, old]), is_same=False
    )
    assert page.index("| b | good b | bad \\| worse | -2.00 | +2.00 |") < page.index("| d | good d")
    assert "2 of 4." in page
    assert "| a |" not in page


def test_a_reward_model_without_numbers_passes_no_gate() -> None:
    for margins in ([np.full(100, np.nan)], [np.ones(100), np.full(100, np.inf)]):
        with pytest.raises(NonFiniteError, match="100 margins"):
            compared(margins, range(100), RetrainConfig())


def test_pairs_that_the_previous_model_was_trained_on_are_left_out(tmp_path: Path) -> None:
    rows = [row("a"), row("b")]
    known = sorted(each[:SEEN_DIGITS] for each in prompt_hashes(rows[:1]))
    write_table(pd.DataFrame({"prompt": known}), tmp_path / "prompts.parquet")
    assert _unseen(rows, []) == rows
    assert _unseen(rows, [tmp_path / "prompts.parquet"]) == rows[1:]
    with pytest.raises(DataError, match="every held-out pair"):
        _unseen(rows[:1], [tmp_path / "prompts.parquet"])


def test_the_gate_refuses_where_what_was_seen_or_the_champions_model_is_nowhere(
    tracked_home: Home, tmp_path: Path
) -> None:
    with pytest.raises(StorageError, match=r"cannot read the file") as caught:
        _unseen([row("a")], [tmp_path / "gone" / "prompts.parquet"])
    assert caught.value.where.endswith("gone/prompts.parquet")
    with pytest.raises(DataError, match="neither in this state directory nor a version of retrain-reward_model"):
        _champions_own("retrain-reward_model", "e" * 64, tmp_path)
