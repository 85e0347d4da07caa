"""Win rate: a judge compares two checkpoints' answers to the same held-out prompts; human pairs audit the judge."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from rlcore.checks.canaries.served_weights import verify_served_weights
from rlcore.config import WinRateConfig
from rlcore.config.answers import JudgeConfig
from rlcore.errors import ConfigError, DataError, RewardError
from rlcore.evaluation.promotion import check_max
from rlcore.evaluation.win_rate import Dependence, JudgeAudit, PairResults, WinRate, audit_judge, dependence, win_rate
from rlcore.models.integrity import verify_model
from rlcore.models.runtime import Runtime
from rlcore.rewards.pair_judge import BothOrders, Pair, PairJudge, judge_both_orders, make_pair_judge
from rlcore.rewards.reward_model import token_scorer
from rlcore.sampling.base import SamplingParams
from rlcore.seeding import derive_seed, shuffled
from rlcore.strict_config import build
from rlcore.tasks.drawing.levels import format_interval
from rlcore.tasks.presets.data import DatasetConfig
from rlcore.tasks.steps.base import MODEL, StageContext, StageResult, prepare_stage_name
from rlcore.tasks.steps.pair_data import tokenize_pairs
from rlcore.tasks.steps.rewards import open_reward_models
from rlcore.tasks.steps.rows import PairRow, read_pairs, read_prompt_sets
from rlcore.tasks.steps.runtime import open_runtime
from rlcore.tasks.steps.sampled_answers import open_sampling, refuse_changed_prompts
from rlcore.tasks.store.storage import matches_digest, note_digest, read_json, read_table, write_json, write_table
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Prompt, Rollout

if TYPE_CHECKING:
    from rlcore.tasks.kinds.win_rate.kind import WinRateStage

PAIRS_PER_CHUNK = 64
JudgedPairs = tuple[str, Pair | None, str]
"""The id of a prompt or of a pair, the pair, and why there is none."""


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
        judge = _judge(context, config.judge, runtime)
        table = judge_pairs(context, judge, answer_pairs(prompts, own, other), name="verdicts")
        asked = human_pairs(context, tokenizer)
        audited = judge_pairs(context, judge, asked, name="audit")
        others = {
            name: judge_pairs(context, _judge(context, reward, runtime), asked, name=f"audit_{name}")
            for name, reward in ((each, JudgeConfig(kind="reward_model", stage=each)) for each in rewards)
            if asked
        }
    seed, confidence, human = context.seed, context.config.confidence, pair_results_of(audited)
    found = win_rate(pair_results_of(table), seed=seed, confidence=confidence)
    asked_of = np.unique(audited["prompt"].to_numpy(dtype=str), return_inverse=True)[1]
    audit = audit_judge(human, asked_of, config.bounds, seed=seed, confidence=confidence) if len(audited) else None
    found_with = {
        name: dependence(human, pair_results_of(each), asked_of, seed=seed, confidence=confidence)
        for name, each in others.items()
    }
    write_table(table, context.folder / "verdicts.parquet")
    if len(audited):
        write_table(audited, context.folder / "audit.parquet")
    return write_summary(context, found, audit, (table, audited), shared=shared, dependences=found_with)


def answer_pairs(prompts: Sequence[Prompt], own: Sequence[Answer], other: Sequence[Answer]) -> list[JudgedPairs]:
    """Return for each prompt its id and pair of answers, or the reason why an engine gave no answer."""
    pairs: list[JudgedPairs] = []
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
    names = {"forward": "forward", "backward": "backward", "lengths": "length", "other_lengths": "other_length"}
    return PairResults(**{name: table[column].to_numpy(dtype=np.float64) for name, column in names.items()})


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
    judge, (table, audited) = stage.settings.judge, tables
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
        "judge": f"{judge.kind} {judge.stage or judge.options.get('model', '')}".strip(),
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


def _judge(context: StageContext, judge: JudgeConfig, runtime: Runtime) -> PairJudge:
    models = open_reward_models(context.inputs, [judge.term], runtime)
    budget = context.config.stage.settings.tokens_per_microbatch
    scorers = {name: token_scorer(model, budget) for name, model in models.items()}
    return make_pair_judge(judge, where=f"stages.{context.stage}.judge", score_tokens=scorers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Answer as a judge reads it, with the chat template's prefill; ``error``: why the engine gave none."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    error: str = ""


def answer(
    context: StageContext,
    stage: str,
    prompts: Sequence[Prompt],
    tokenizer: ChatTokenizer,
    runtime: Runtime,
    *,
    side: str,
) -> list[Answer]:
    """Return an answer of the checkpoint of the stage ``stage`` to each prompt, reusing those on disk."""
    config: WinRateConfig = context.config.stage.settings
    path = context.work / "answers" / f"{side}.json"  # a digest is stored next to the folder
    if matches_digest(path):
        return [build(Answer, document) for document in read_json(path)]
    folder, sampling = context.inputs[stage] / MODEL, config.sampling
    params = SamplingParams(
        temperature=sampling.temperature, max_new_tokens=sampling.max_new_tokens, num_samples=1, greedy=config.greedy
    )
    with open_sampling(context, folder, prompts, tokenizer, runtime) as (engine, sampler):
        verify_served_weights(engine, folder, prompts, runtime, seed=derive_seed(context.seed, "served"))
        refuse_changed_prompts(context, sampler, "a judge would compare answers to a prompt that it has not read")
        groups = sampler.sample(prompts, params, seed=derive_seed(context.seed, "win_rate", side))
    found = [
        Answer(text=tokenizer.prefill + one.transcript, token_ids=one.completion_ids)
        if isinstance(one, Rollout)
        else Answer(error=one.reason)
        for (one,) in groups
    ]
    write_json([asdict(each) for each in found], path)
    note_digest(path)
    return found


def human_pairs(context: StageContext, tokenizer: ChatTokenizer) -> list[JudgedPairs]:
    """Return the requested number of held-out human pairs, the better answer first; the seed chooses them.

    Empty without datasets of human pairs.
    Raises:
        DataError: the datasets hold out none.
    """
    stage: WinRateStage = context.config.stage
    data: Mapping[str, DatasetConfig] = context.config.data if stage.human_pairs else {}
    found: list[JudgedPairs] = []
    for name, config in data.items():
        rows = read_pairs(context.inputs[prepare_stage_name(name)] / "eval.parquet")
        tokens = tokenize_pairs(rows, tokenizer, max_tokens=config.max_tokens)
        for row, ids in zip(rows, tokens, strict=True):
            pair = Pair(
                messages=row.messages,
                first=row.chosen,
                second=row.rejected,
                prompt_ids=ids.prompt_ids,
                first_ids=ids.chosen_ids,
                second_ids=ids.rejected_ids,
            )
            found.append((_question(row), pair, ""))
    if data and not found:
        raise DataError(
            "there are no held-out human pairs to audit the judge on",
            where=f"stages.{context.stage}.human_pairs",
            fix="raise num_eval of the dataset",
        )
    return [
        found[place] for place in shuffled(len(found), context.seed, "human pairs")[: stage.settings.num_human_pairs]
    ]


def judge_pairs(context: StageContext, judge: PairJudge, asked: Sequence[JudgedPairs], *, name: str) -> pd.DataFrame:
    """Judge pairs in both orders, a row each, reusing chunks on disk.

    Raises:
        RewardError: more than ``max_unjudged`` of the pairs are certainly unjudged, with the most frequent reason.
    """
    limit, errors = context.config.stage.settings.max_unjudged * len(asked), Counter[str]()
    tables: list[pd.DataFrame] = []
    total = math.ceil(len(asked) / PAIRS_PER_CHUNK)
    for number in range(total):
        path = context.work / name / f"chunk-{number:05d}.parquet"
        is_there = matches_digest(path)
        chunk = asked[number * PAIRS_PER_CHUNK : (number + 1) * PAIRS_PER_CHUNK]
        table = read_table(path) if is_there else _judged(judge, chunk)
        errors.update(reasons_of(table))
        _refuse(errors, limit, len(asked), where=f"stages.{context.stage}.judge")
        if not is_there:  # a chunk that made the stage fail is judged again
            path.parent.mkdir(exist_ok=True)
            write_table(table, path)
            note_digest(path)
        tables.append(table)
        context.report_progress(f"{context.stage} {name}", number + 1, total)
    return pd.concat(tables, ignore_index=True) if tables else _judged(judge, ())


def _judged(judge: PairJudge, asked: Sequence[JudgedPairs]) -> pd.DataFrame:
    results = iter(judge_both_orders(judge, [pair for _, pair, _ in asked if pair is not None]))
    rows = [_row(prompt, pair, None if pair is None else next(results), why) for prompt, pair, why in asked]
    return pd.DataFrame(rows, columns=list(_COLUMNS)).astype(_COLUMNS)


def _row(prompt: str, pair: Pair | None, both: BothOrders | None, why: str) -> dict[str, Any]:
    if pair is None or both is None:
        return _NOT_JUDGED | {"prompt": prompt, "error": why}
    orders = both.forward, both.backward
    nan = float("nan")
    return {
        "prompt": prompt,
        "forward": nan if orders[0].value is None else orders[0].value,
        "backward": nan if orders[1].value is None else orders[1].value,
        "length": len(pair.first),
        "other_length": len(pair.second),
        "first": pair.first,
        "second": pair.second,
        "error": next((order.error for order in orders if order.value is None), ""),
        "asked": both.was_judged,
        "calls": 2 * both.was_judged,
        "failed_calls": sum(order.value is None for order in orders),
        "tokens": sum(order.prompt_tokens + order.completion_tokens for order in orders),
        "cost": sum(order.cost for order in orders),
    }


_NOT_JUDGED: dict[str, Any] = {
    "prompt": "",
    "forward": float("nan"),
    "backward": float("nan"),
    "length": 0,
    "other_length": 0,
    "first": "",
    "second": "",
    "error": "",
    "asked": False,
    "calls": 0,
    "failed_calls": 0,
    "tokens": 0,
    "cost": 0.0,
}
_COLUMNS = {name: type(value).__name__ for name, value in _NOT_JUDGED.items()}


def reasons_of(table: pd.DataFrame) -> Counter[str]:
    """Count the reasons of unjudged pairs, without the text that they quote from a judge."""
    return Counter(re.sub(r": ['\"].*", "", error, flags=re.DOTALL) for error in table["error"] if error)


def _refuse(errors: Counter[str], limit: float, count: int, *, where: str) -> None:
    unjudged = errors.total()
    if unjudged > limit:
        most, times = errors.most_common(1)[0]
        raise RewardError(
            f"judge failed on {unjudged} of {count} pairs (limit {limit:g}), {times} times with: {most}",
            where=where,
            fix="check that the judge answers in the required form, or raise max_unjudged",
        )


def _question(row: PairRow) -> str:
    """Return the key of a pair's question: pairs of one are dependent in the audit's intervals."""
    return json.dumps([[message.role, message.content] for message in row.messages])
