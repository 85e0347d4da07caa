"""The reward model's report: every figure is in the glossary, and the tables say what stands where."""

from __future__ import annotations

import pandas as pd
import torch

from rlcore.metrics import check_names
from rlcore.strict_config import build
from rlcore.tasks.kinds.reward_model.page import render
from rlcore.tasks.kinds.reward_model.step import HeldOut, held_out_figures, suspects_table
from rlcore.tasks.steps.rows import PairRow
from rlcore.training.label_audit import SuspectLabel
from rlcore.training.preferences import TokenPair, different_sequences
from rlcore.training.reward_calibration import ReliabilityBin
from rlcore.types import Message


def held_out(scores: list[tuple[float, float]]) -> HeldOut:
    """Pairs with the given scores of their sides; the chosen side has 1, 2, 3, … tokens, the rejected one 2."""
    pairs = [
        TokenPair(set_id=str(n), prompt_ids=(n,), chosen_ids=(3,) * (1 + n % 3), rejected_ids=(4, 4))
        for n in range(len(scores))
    ]
    flat = torch.tensor([score for sides in scores for score in sides])
    return HeldOut(
        pairs=pairs, sequences=different_sequences(pairs), scores=flat, rewards=torch.stack([flat, flat + 0.2])
    )


def test_the_figures_of_six_pairs() -> None:
    # Margins 1, 1, 1, 1, -1, 1: five of six right. Longer in two of six, equal in two: the heuristic scores 3 / 6.
    found = held_out_figures(held_out([(1, 0), (1, 0), (1, 0), (1, 0), (0, 1), (1, 0)]), seed=0, confidence=0.95)
    metrics = found.metrics
    check_names(metrics)
    assert abs(metrics["rm/eval_accuracy"] - 5 / 6) < 1e-9
    assert metrics["rm/length_accuracy"] == 0.5
    assert abs(metrics["rm/gain_over_length"] - 1 / 3) < 1e-9
    assert metrics["rm/gain_over_length_low"] <= metrics["rm/gain_over_length"] <= metrics["rm/gain_over_length_high"]
    assert [metrics[f"rm/pairs_when_{name}"] for name in ("longer", "shorter", "equal")] == [2.0, 2.0, 2.0]
    assert metrics["rm/accuracy_when_equal"] == 0.5
    assert abs(metrics["rm/disagreement"] - 0.1) < 1e-6
    assert [row["num_pairs"] for row in found.reliability] == [6]
    page = render(metrics, [build(ReliabilityBin, row) for row in found.reliability], confidence=0.9)
    assert "0.833 [" in page.splitlines()[0]
    assert "| accuracy if the chosen answer is shorter | 1.000 [" in page


def test_suspects_are_written_with_their_row_margin_and_an_excerpt() -> None:
    messages = (Message(role="user", content="q" * 500),)
    rows = [
        PairRow(
            pair_id=f"p{n}",
            set_id=f"p{n}",
            messages=messages,
            chosen=f"yes {n}",
            rejected="no",
            margin=0.0,
            probability=1.0,
            weight=1.0,
            source="me",
        )
        for n in range(3)
    ]
    table = suspects_table([SuspectLabel(row=2, margin=-3.0), SuspectLabel(row=0, margin=1.0)], rows)
    assert table[["row", "pair_id", "margin", "chosen"]].to_dict("records") == [
        {"row": 2, "pair_id": "p2", "margin": -3.0, "chosen": "yes 2"},
        {"row": 0, "pair_id": "p0", "margin": 1.0, "chosen": "yes 0"},
    ]
    assert table["prompt"].str.len().max() == 160
    assert isinstance(suspects_table([], rows), pd.DataFrame)
