"""Win rate: a judge compares two checkpoints' answers to the same held-out prompts; human pairs audit the judge."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from rlcore.config import WinRateConfig
from rlcore.config.answers import JudgeConfig
from rlcore.errors import ConfigError
from rlcore.evaluation.promotion import check_max
from rlcore.evaluation.win_rate import Dependence, JudgeAudit, PairResults, WinRate, audit_judge, dependence, win_rate
from rlcore.models.integrity import verify_model
from rlcore.models.runtime import Runtime
from rlcore.rewards.pair_judge import Pair, PairJudge, make_pair_judge
from rlcore.rewards.reward_model import token_scorer
from rlcore.tasks.drawing.levels import format_interval
from rlcore.tasks.kinds.win_rate.judged_pairs import Answer, answer, human_pairs, judge_pairs, reasons_of
from rlcore.tasks.steps.base import MODEL, StageContext, StageResult
from rlcore.tasks.steps.rewards import open_reward_models
from rlcore.tasks.steps.runtime import open_runtime
from rlcore.tasks.steps.tokens import read_prompt_sets
from rlcore.tasks.store.storage import write_json, write_table
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Prompt

if TYPE_CHECKING:
    from rlcore.tasks.kinds.win_rate.kind import WinRateStage


def run_win_rate(
    context: StageContext, *, policy: str, reference: str, rewards: Sequence[str], shared: Sequence[str]
) -> StageResult:
    """Measure how often a judge prefers answers of the stage ``policy`` to those of ``reference``.

    ``rewards``: stages of the policy's reward models, with which a judge's agreement is measured. ``shared``: reasons
    why the judge is not independent of them. The artifact has all results (``verdicts.parquet``, ``audit.parquet``) and
    the summary (``win_rate.json``).
    Raises:
        ConfigError: the checkpoints have different tokenizers.
        RewardError: too many pairs are unjudged.
    """
    stage: WinRateStage = context.config.stage
    config = stage.settings
    tokenizer = _tokenizer(context, policy, reference)
    prompts = read_prompt_sets(context, stage.data, "eval", tokenizer, limit=config.num_prompts or None)
    with open_runtime(context.config.hardware, seed=context.seed) as runtime:
        own = answer(context, policy, prompts, tokenizer, runtime, side="policy")
        other = answer(context, reference, prompts, tokenizer, runtime, side="reference")
        judge = _judge(context, config, runtime)
        table = judge_pairs(context, judge, answer_pairs(prompts, own, other), name="verdicts")
        asked = human_pairs(context, tokenizer)
        audited = judge_pairs(context, judge, asked, name="audit")
        others = {
            name: judge_pairs(context, _judge(context, _judged_by(config, name), runtime), asked, name=f"audit_{name}")
            for name in rewards
            if asked
        }
    found = win_rate(pair_results_of(table), seed=context.seed, confidence=context.config.confidence)
    audit = _audit(context, audited, config)
    found_with = {name: _dependence(context, audited, table) for name, table in others.items()}
    write_table(table, context.folder / "verdicts.parquet")
    if len(audited):
        write_table(audited, context.folder / "audit.parquet")
    return write_summary(context, found, audit, (table, audited), shared=shared, dependences=found_with)


def answer_pairs(
    prompts: Sequence[Prompt], own: Sequence[Answer], other: Sequence[Answer]
) -> list[tuple[str, Pair | None, str]]:
    """Return for each prompt its id and pair of answers, or the reason why an engine gave no answer."""
    pairs: list[tuple[str, Pair | None, str]] = []
    for prompt, first, second in zip(prompts, own, other, strict=True):
        if first.error or second.error:
            pairs.append((prompt.prompt_id, None, f"no answer: {first.error or second.error}"))
            continue
        pair = Pair(
            messages=prompt.messages,
            first=first.text,
            second=second.text,
            reference=prompt.reference,
            prompt_ids=prompt.token_ids,
            first_ids=first.token_ids,
            second_ids=second.token_ids,
        )
        pairs.append((prompt.prompt_id, pair, ""))
    return pairs


def pair_results_of(table: pd.DataFrame) -> PairResults:
    """Return the results of a table of judged pairs."""
    columns = {name: table[name].to_numpy(dtype=np.float64) for name in ("forward", "backward", "length")}
    others = table["other_length"].to_numpy(dtype=np.float64)
    return PairResults(
        forward=columns["forward"], backward=columns["backward"], lengths=columns["length"], other_lengths=others
    )


def write_summary(
    context: StageContext,
    found: WinRate,
    audit: JudgeAudit | None,
    tables: tuple[pd.DataFrame, pd.DataFrame],
    *,
    shared: Sequence[str],
    dependences: Mapping[str, Dependence],
) -> StageResult:
    """Write ``win_rate.json``, log the win rate, and return the stage's result. ``tables``: verdicts and audit."""
    stage: WinRateStage = context.config.stage
    table, audited = tables
    both = pd.concat([table, audited], ignore_index=True)
    reasons = [*shared, *(["the judge was not audited: name human_pairs"] if audit is None else [])]
    limit = stage.settings.bounds.max_dependence
    for name, each in dependences.items():
        agreed = f"agreement beyond independent errors of the judge with the reward model {name}"
        check = check_max(agreed, each.excess.mean, limit)
        reasons += [] if check.passed else [check.sentence]
        context.log(f"judge_agreement={each.agreement.mean:.3f} dependence={each.excess.mean:.3f} reward={name}")
    reasons += [check.sentence for check in audit.checks if not check.passed] if audit else []
    document: dict[str, Any] = {
        "policy": stage.policy,
        "reference": stage.baseline,
        "judge": judge_name(stage),
        "found": dataclasses.asdict(found),
        "audit": dataclasses.asdict(audit) if audit else None,
        "dependence": {name: dataclasses.asdict(each) for name, each in dependences.items()},
        "distrust": reasons,
        "unjudged": dict(reasons_of(table)),
        "prompts": len(table),
        "identical": int((~table["asked"] & (table["error"] == "")).sum()),
        "calls": int(both["calls"].sum()),
        "failed_calls": int(both["failed_calls"].sum()),
        "tokens": int(both["tokens"].sum()),
        "cost": float(both["cost"].sum()),
    }
    write_json(document, context.folder / "win_rate.json")
    metrics = metrics_of(document, audited)
    context.tracker.log_metrics(metrics, step=0)
    context.tracker.log_artifact(context.folder / "win_rate.json", "win_rate")
    rate, doubts = found.rate, f"; not trusted: {'; '.join(reasons)}" if reasons else ""
    interval = format_interval(rate.low, rate.high, context.config.confidence)
    context.log(f"win_rate={rate.mean:.3f} {interval} n={rate.n} baseline={stage.baseline}{doubts}")
    return StageResult(metrics=metrics, rows=len(table))


def judge_name(stage: WinRateStage) -> str:
    """Name the judge for reports."""
    judge = stage.settings.judge
    model = judge.options.get("model", "")
    return f"{judge.kind} {judge.stage or model}".strip()


def metrics_of(document: dict[str, Any], audited: pd.DataFrame) -> dict[str, float]:
    """Return the stage's metrics by their glossary names."""
    found, audit = document["found"], document["audit"]
    metrics = {
        **_bounds("win_rate/rate", found["rate"]),
        **_bounds("win_rate/length_controlled", found["length_controlled"]),
        **_bounds("win_rate/order_flip_rate", found["order_dependent"]),
        "win_rate/first_position_rate": found["first"],
        "win_rate/ties": found["ties"] / found["rate"]["n"],
        "win_rate/prompts": float(document["prompts"]),
        "win_rate/unjudged": 1.0 - found["rate"]["n"] / document["prompts"],
        "win_rate/trusted": float(not document["distrust"]),
        "win_rate/calls": float(document["calls"]),
        "win_rate/failed_calls": float(document["failed_calls"]),
        "win_rate/tokens": float(document["tokens"]),
        "win_rate/cost": document["cost"],
    }
    if audit is None:
        return metrics
    metrics |= _bounds("judge/order_flip_rate", audit["order_dependent"])
    for name in ("agreement", "length_bias", "beyond_length"):
        metrics |= _bounds(f"judge/{name}", audit[name])
    if document["dependence"]:
        worst = max(document["dependence"].values(), key=lambda each: float(each["excess"]["mean"]))
        metrics |= _bounds("judge/reward_agreement", worst["agreement"])
        metrics |= _bounds("judge/reward_dependence", worst["excess"])
    return metrics | {"judge/first_position_rate": audit["first"], "judge/pairs": float(len(audited))}


def _bounds(name: str, interval: dict[str, float]) -> dict[str, float]:
    return {name: interval["mean"], f"{name}_low": interval["low"], f"{name}_high": interval["high"]}


def _tokenizer(context: StageContext, policy: str, reference: str) -> ChatTokenizer:
    own, other = (
        verify_model(context.inputs[name], stage=name, model=context.inputs[name] / MODEL)
        for name in (policy, reference)
    )
    if not own.is_same_as(other):
        raise ConfigError(
            f"{policy} and {reference} have different tokenizers",
            where=f"stages.{context.stage}.baseline",
            fix="compare checkpoints of one family",
        )
    return own


def _judge(context: StageContext, config: WinRateConfig, runtime: Runtime) -> PairJudge:
    models = open_reward_models(context.inputs, [config.judge.term], runtime)
    scorers = {name: token_scorer(model, config.tokens_per_microbatch) for name, model in models.items()}
    return make_pair_judge(config.judge, where=f"stages.{context.stage}.judge", score_tokens=scorers)


def _judged_by(config: WinRateConfig, reward: str) -> WinRateConfig:
    return dataclasses.replace(config, judge=JudgeConfig(kind="reward_model", stage=reward))


def _dependence(context: StageContext, audited: pd.DataFrame, others: pd.DataFrame) -> Dependence:
    own, other = pair_results_of(audited), pair_results_of(others)
    return dependence(own, other, _prompts(audited), seed=context.seed, confidence=context.config.confidence)


def _prompts(table: pd.DataFrame) -> np.ndarray:
    return np.unique(table["prompt"].to_numpy(dtype=str), return_inverse=True)[1]


def _audit(context: StageContext, table: pd.DataFrame, config: WinRateConfig) -> JudgeAudit | None:
    if table.empty:
        return None
    results, confidence = pair_results_of(table), context.config.confidence
    return audit_judge(results, _prompts(table), config.bounds, seed=context.seed, confidence=confidence)
