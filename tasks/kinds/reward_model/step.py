"""Reward model: trained on preferences, compared with the length heuristic on held-out pairs, centered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from rlcore.config import RewardModelConfig
from rlcore.errors import TrainingError
from rlcore.evaluation.intervals import (
    Interval,
    cluster_bootstrap,
    expected_calibration_error,
    pair_accuracy,
    with_bounds,
)
from rlcore.models.integrity import verify_model
from rlcore.models.reward_ensemble import RewardScale, RewardScales, lengths_of
from rlcore.models.runtime import Runtime
from rlcore.seeding import derive_seed
from rlcore.tasks.steps.base import MODEL, StageContext, StageResult
from rlcore.tasks.steps.pair_data import margins_of, numbered, read_gold_pairs, read_pair_data
from rlcore.tasks.steps.ranks import open_supervised, step_reporter
from rlcore.tasks.steps.rows import PairRow
from rlcore.tasks.steps.runtime import open_runtime, peak_memory_gib
from rlcore.tasks.store.storage import write_json, write_table
from rlcore.text.packing import TokenSequence
from rlcore.training import reward_calibration as quality
from rlcore.training import reward_model as rm
from rlcore.training.audit.supervised_data import label_noise, require_gold_pairs, require_labels
from rlcore.training.label_audit import SuspectLabel, folds_of
from rlcore.training.preferences import TokenPair, different_sequences, preference_sets

TABLES = ("reliability.json", "label_audit.parquet")
NUM_PROBES = 4  # completions that a slow path scores again


def run_reward_model(context: StageContext, *, start: str) -> StageResult:
    """Train a Bradley-Terry model from the stage ``start``; fail below the preset's held-out accuracy."""
    checkpoint, half = context.inputs[start] / MODEL, context.config.stage.half
    if half != "all":  # neither head nor order of its twin on the other half
        context = replace(context, seed=derive_seed(context.seed, "half", half))
    config: RewardModelConfig = context.config.stage.settings
    tokenizer = verify_model(context.inputs[start], stage=start, model=checkpoint)
    data, gold_pairs = read_pair_data(context, tokenizer), read_gold_pairs(context, tokenizer)
    history: list[Mapping[str, float]] = []
    report = step_reporter(context, history, "rm", num_steps=_num_steps(config, data.train))
    with open_runtime(context.config.hardware, seed=context.seed) as runtime:
        with _learner(context, checkpoint, runtime) as learner:
            fitted = rm.fit_reward_model(learner, data.train, config, seed=context.seed, report=report)
            noise = label_noise([suspect.margin for suspect in fitted.suspects])
            if fitted.suspects:
                context.log(str(noise))
            require_labels(noise, config.max_label_noise)
            members = rm.measure_scales(fitted, data.train, length_debias=config.loss.length_debias, seed=context.seed)
            held_out = _score_pairs(learner, data.held_out, members)
            known = _score_pairs(learner, gold_pairs, members) if gold_pairs else None
            learner.probe(held_out.sequences[:NUM_PROBES])
            learner.save_model(checkpoint, context.folder / MODEL)
        memory = peak_memory_gib(runtime.device)
    found = held_out_figures(held_out, seed=context.seed, confidence=context.config.confidence)
    scales = RewardScales(members=members, temperature=found.metrics["rm/temperature"])
    scales.save(context.folder / MODEL)
    metrics = dict(found.metrics) | _audit_metrics(fitted.suspects)
    on_gold = pair_accuracy_of(known, confidence=context.config.confidence) if known else None
    if on_gold:
        metrics |= with_bounds("rm/gold_accuracy", on_gold) | {"rm/gold_pairs": float(len(gold_pairs))}
    write_json(metrics, context.folder / "metrics.json")
    write_json(list(found.reliability), context.folder / "reliability.json")
    write_table(suspects_table(fitted.suspects, data.rows), context.folder / "label_audit.parquet")
    context.tracker.log_metrics(metrics, step=len(history))
    write_json(history, context.folder / "history.json")
    for name in TABLES:
        context.tracker.log_artifact(context.folder / name, "reward_model")
    accuracy, count = metrics["rm/eval_accuracy"], metrics["rm/eval_pairs"]
    context.log(f"eval_accuracy={accuracy:.3f} n={count:.0f}")
    if on_gold:
        context.log(f"gold_accuracy={on_gold.mean:.3f} n={len(gold_pairs)}")
        require_gold_pairs(on_gold)
    _require_accuracy(accuracy, config.min_accuracy, where=f"stages.{context.stage}.min_accuracy")
    return StageResult(metrics=metrics | {"memory/peak_gib": memory})


def _learner(context: StageContext, checkpoint: Path, runtime: Runtime) -> AbstractContextManager[rm.RewardLearner]:
    def here() -> rm.RewardLearner:
        config, seed = context.config.stage.settings, context.seed
        backbone = rm.reward_backbone(checkpoint, config.backbone, runtime, seed=seed)
        return rm.RewardLearner(rm.reward_members(backbone, config, seed=seed), config)

    return open_supervised(context, checkpoint, runtime, here=here)


def _num_steps(config: RewardModelConfig, pairs: list[TokenPair]) -> int:
    """Return the steps of all members; with a frozen backbone each head is one step."""
    steps = 1 if config.backbone.trainable_layers == 0 else -(-len(preference_sets(pairs)) // config.batch_size)
    return config.ensemble * steps * (1 if config.backbone.trainable_layers == 0 else config.num_epochs)


def _score_pairs(learner: rm.RewardLearner, pairs: list[TokenPair], members: tuple[RewardScale, ...]) -> HeldOut:
    sequences: list[TokenSequence] = different_sequences(pairs)
    raw = learner.scores(sequences)
    lengths = lengths_of([sequence.completion_ids for sequence in sequences])
    own = list(zip(members, raw, strict=True))
    scores = torch.stack([scale.centered(each, lengths) for scale, each in own])
    rewards = torch.stack([scale.centered(each, lengths) / scale.scale for scale, each in own])
    return HeldOut(pairs=pairs, sequences=sequences, scores=scores.mean(dim=0), rewards=rewards)


def _audit_metrics(suspects: tuple[SuspectLabel, ...]) -> dict[str, float]:
    if not suspects:
        return {}
    doubted = sum(one.margin < -2.0 for one in suspects)
    return {
        "rm/audit_accuracy": sum(one.margin > 0.0 for one in suspects) / len(suspects),
        "rm/suspect_labels": doubted / len(suspects),
        "rm/label_noise": label_noise([one.margin for one in suspects]).fraction,
    }


def _require_accuracy(found: float, wanted: float, *, where: str) -> None:
    if not found >= wanted:  # NaN is below no limit
        raise TrainingError(
            f"held-out pair accuracy is {found:.3f}, the preset requires {wanted:.3f}",
            where=where,
            fix="train longer, look at the pairs in the preference snapshot, or lower the bound",
        )


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
    scores = held_out.scores.double().numpy()
    return margins_of(scores, held_out.pairs), numbered([pair.prompt_ids for pair in held_out.pairs])


def _accuracy_metrics(
    margins: quality.Floats, log_ratios: quality.Floats, prompts: np.ndarray, *, seed: int, confidence: float
) -> dict[str, float]:
    by_length, ours = np.heaviside(log_ratios, 0.5), np.heaviside(margins, 0.5)
    gain = cluster_bootstrap(
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
    prompts = numbered([sequence.prompt_ids for sequence in held_out.sequences])
    lengths = np.log([len(sequence.completion_ids) for sequence in held_out.sequences])
    scores = held_out.scores.double().numpy()
    within = quality.within_groups(scores, prompts), quality.within_groups(lengths, prompts)
    metrics: dict[str, float] = {}
    for name, (first, second) in {"overall": (scores, lengths), "within": within}.items():

        def statistic(rows: np.ndarray, x: quality.Floats = first, y: quality.Floats = second) -> float:
            return quality.correlation(x[rows], y[rows])

        interval = cluster_bootstrap(statistic, prompts, seed=seed, confidence=confidence)
        metrics |= with_bounds(f"rm/length_correlation_{name}", interval)
    of_pairs = numbered([pair.prompt_ids for pair in held_out.pairs])
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
