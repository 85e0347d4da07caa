"""Metrics of a reward model on held-out pairs, with intervals and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch

from rlcore.evaluation.intervals import Interval, expected_calibration_error, pair_accuracy
from rlcore.tasks.steps.rows import PairRow
from rlcore.text.packing import TokenSequence
from rlcore.training import reward_calibration as quality
from rlcore.training.label_audit import SuspectLabel
from rlcore.training.linear_head import folds_of
from rlcore.training.preferences import TokenPair

EXCERPT_CHARACTERS = 160


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeldOut:
    """Held-out pairs and the members' scores of their completions.

    ``sequences``: each completion once; ``scores`` [S]: mean over the members, centered, in log-odds; ``rewards`` [M,
    S]: each member's reward, in standard deviations of the reference set.
    """

    pairs: Sequence[TokenPair]
    sequences: Sequence[TokenSequence]
    scores: torch.Tensor
    rewards: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutFigures:
    """``metrics`` by their glossary names, and the rows of the reliability table."""

    metrics: Mapping[str, float]
    reliability: Sequence[Mapping[str, Any]]


def held_out_figures(held_out: HeldOut, *, seed: int, confidence: float) -> HeldOutFigures:
    """Measure accuracy next to the length heuristic's, calibration before and after a temperature, and length bias."""
    margins, prompts = _margins(held_out)
    log_ratios = np.array([np.log(len(pair.chosen_ids) / len(pair.rejected_ids)) for pair in held_out.pairs])
    metrics = _accuracy_metrics(margins, log_ratios, prompts, seed=seed, confidence=confidence)
    metrics |= _calibration_metrics(margins, prompts, seed=seed, confidence=confidence)
    metrics |= _length_metrics(held_out, margins, log_ratios, seed=seed, confidence=confidence)
    if len(held_out.rewards) > 1:
        metrics["rm/disagreement"] = float(held_out.rewards.std(dim=0, unbiased=False).mean())
    rows = quality.reliability_table(margins, prompts, confidence=confidence)
    return HeldOutFigures(metrics=metrics, reliability=[asdict(row) for row in rows])


def pair_accuracy_of(held_out: HeldOut, *, confidence: float) -> Interval:
    """Return the fraction of pairs whose chosen side has the higher score, with an interval by prompts."""
    margins, prompts = _margins(held_out)
    return pair_accuracy(margins, prompts=prompts, confidence=confidence)


def _margins(held_out: HeldOut) -> tuple[quality.Floats, np.ndarray]:
    """Return the score difference of chosen and rejected side of each pair, and the number of its prompt."""
    place = {sequence: number for number, sequence in enumerate(held_out.sequences)}
    scores = held_out.scores.double().numpy()
    chosen, rejected = ([place[pair.sides[side]] for pair in held_out.pairs] for side in (0, 1))
    numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(p.prompt_ids for p in held_out.pairs))}
    return scores[chosen] - scores[rejected], np.array([numbers[pair.prompt_ids] for pair in held_out.pairs])


def with_bounds(name: str, interval: Interval) -> dict[str, float]:
    """Return an interval as three metrics."""
    return {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}


def _accuracy_metrics(
    margins: quality.Floats, log_ratios: quality.Floats, prompts: np.ndarray, *, seed: int, confidence: float
) -> dict[str, float]:
    by_length, ours = np.heaviside(log_ratios, 0.5), np.heaviside(margins, 0.5)
    gain = quality.cluster_bootstrap(
        lambda rows: float((ours - by_length)[rows].mean()), prompts, seed=seed, confidence=confidence
    )
    return {
        **with_bounds("rm/eval_accuracy", pair_accuracy(margins, prompts=prompts, confidence=confidence)),
        "rm/length_accuracy": float(by_length.mean()),
        **with_bounds("rm/gain_over_length", gain),
        "rm/eval_pairs": float(len(margins)),
    }


def _calibration_metrics(
    margins: quality.Floats, prompts: np.ndarray, *, seed: int, confidence: float
) -> dict[str, float]:
    """Fit the temperature on one half of the prompts and measure its gain on the other."""
    metrics = {
        **with_bounds("rm/ece", quality.calibration_interval(margins, prompts, seed=seed, confidence=confidence)),
        "rm/brier": quality.brier_score(margins),
    }
    is_fitted_on = folds_of(torch.from_numpy(prompts), min(2, len(set(prompts.tolist()))), seed=seed).numpy() == 0
    metrics["rm/temperature"] = quality.fit_temperature(margins[is_fitted_on])
    rest = margins[~is_fitted_on]
    if len(rest):
        metrics["rm/ece_before"] = expected_calibration_error(rest)
        metrics["rm/ece_calibrated"] = expected_calibration_error(rest / metrics["rm/temperature"])
    return metrics


def _length_metrics(
    held_out: HeldOut, margins: quality.Floats, log_ratios: quality.Floats, *, seed: int, confidence: float
) -> dict[str, float]:
    numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(s.prompt_ids for s in held_out.sequences))}
    prompts = np.array([numbers[sequence.prompt_ids] for sequence in held_out.sequences])
    lengths = np.log([len(sequence.completion_ids) for sequence in held_out.sequences])
    scores = held_out.scores.double().numpy()
    within = quality.within_groups(scores, prompts), quality.within_groups(lengths, prompts)
    metrics: dict[str, float] = {}
    for name, (first, second) in {"overall": (scores, lengths), "within": within}.items():

        def statistic(rows: np.ndarray, x: quality.Floats = first, y: quality.Floats = second) -> float:
            return quality.correlation(x[rows], y[rows])

        interval = quality.cluster_bootstrap(statistic, prompts, seed=seed, confidence=confidence)
        metrics |= with_bounds(f"rm/length_correlation_{name}", interval)
    of_pairs = np.array([numbers[pair.prompt_ids] for pair in held_out.pairs])
    for name, part in quality.accuracy_by_length(margins, log_ratios, of_pairs, confidence=confidence).items():
        metrics |= with_bounds(f"rm/accuracy_when_{name}", part)
        metrics[f"rm/pairs_when_{name}"] = float(part.n)
    return metrics


def suspects_table(suspects: Sequence[SuspectLabel], rows: Sequence[PairRow]) -> pd.DataFrame:
    """List training pairs by decreasing doubt: row of ``train.parquet`` (from 0), margin, and content."""
    return pd.DataFrame(
        [
            {
                "row": one.row,
                "pair_id": rows[one.row].pair_id,
                "margin": one.margin,
                "prompt": rows[one.row].messages[-1].content[:EXCERPT_CHARACTERS],
                "chosen": rows[one.row].chosen[:EXCERPT_CHARACTERS],
                "rejected": rows[one.row].rejected[:EXCERPT_CHARACTERS],
            }
            for one in suspects
        ],
        columns=["row", "pair_id", "margin", "prompt", "chosen", "rejected"],
    )
