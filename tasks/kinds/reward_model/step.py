"""Reward model: trained on preferences, compared with the length heuristic on held-out pairs, centered."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import torch

from rlcore.checks.audit.integrity import verify_model
from rlcore.checks.audit.supervised_data import label_noise, require_gold_pairs, require_labels
from rlcore.choices import choices
from rlcore.config import RewardModelConfig
from rlcore.distributed.distributed_supervised import DistributedReward
from rlcore.errors import TrainingError
from rlcore.hardware.runtime import Runtime
from rlcore.models.reward_scale import RewardScale, RewardScales, lengths_of
from rlcore.seeding import derive_seed
from rlcore.tasks.kinds.reward_model.figures import (
    HeldOut,
    held_out_figures,
    pair_accuracy_of,
    suspects_table,
    with_bounds,
)
from rlcore.tasks.steps.base import MODEL, StageContext, StageResult
from rlcore.tasks.steps.pair_data import read_gold_pairs, read_pair_data
from rlcore.tasks.steps.ranks import open_supervised
from rlcore.tasks.steps.runtime import open_runtime, peak_memory_gib
from rlcore.tasks.store.storage import write_json, write_table
from rlcore.text.packing import TokenSequence
from rlcore.training.label_audit import SuspectLabel
from rlcore.training.preferences import TokenPair, different_sequences, preference_sets
from rlcore.training.reward_fit import fit_reward_model, measure_scales
from rlcore.training.reward_learner import RewardHandle, RewardLearner, reward_backbone, reward_members
from rlcore.training.reward_model import Report

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
    report = _reporter(context, history, num_steps=_num_steps(config, data.train))
    with open_runtime(context.config.hardware, seed=context.seed) as runtime:
        with _learner(context, checkpoint, runtime) as learner:
            fitted = fit_reward_model(learner, data.train, config, seed=context.seed, report=report)
            noise = label_noise([suspect.margin for suspect in fitted.suspects])
            if fitted.suspects:
                context.log(str(noise))
            require_labels(noise, config.max_label_noise)
            members = measure_scales(fitted, data.train, length_debias=config.loss.length_debias, seed=context.seed)
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


def _learner(context: StageContext, checkpoint: Path, runtime: Runtime) -> AbstractContextManager[RewardHandle]:
    def here() -> RewardLearner:
        config, seed = context.config.stage.settings, context.seed
        backbone = reward_backbone(checkpoint, config.backbone, runtime, seed=seed)
        return RewardLearner(reward_members(backbone, config, seed=seed), config)

    return open_supervised(context, checkpoint, runtime, here=here, groups=GROUPS)


GROUPS = choices("distributed.backend", {"processes": DistributedReward, "ray": DistributedReward})


def _num_steps(config: RewardModelConfig, pairs: list[TokenPair]) -> int:
    """Return the steps of all members; with a frozen backbone each head is one step."""
    steps = 1 if config.backbone.trainable_layers == 0 else -(-len(preference_sets(pairs)) // config.batch_size)
    return config.ensemble * steps * (1 if config.backbone.trainable_layers == 0 else config.num_epochs)


def _reporter(context: StageContext, history: list[Mapping[str, float]], *, num_steps: int) -> Report:
    """Return a reporter that numbers steps across members, so that the curves of an ensemble follow one another."""

    def report(_: int, metrics: Mapping[str, float]) -> None:
        step = len(history) + 1
        history.append({"iteration": step, **metrics})
        context.tracker.log_metrics(metrics, step=step)
        if step % max(1, num_steps // 10) == 0 or step == num_steps:
            context.log(f"step {step}/{num_steps} loss={metrics['rm/loss']:.3f} accuracy={metrics['rm/accuracy']:.3f}")

    return report


def _score_pairs(learner: RewardHandle, pairs: list[TokenPair], members: tuple[RewardScale, ...]) -> HeldOut:
    """Score the completions of pairs, without the length bias if the members' scales correct it."""
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
