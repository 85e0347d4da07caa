"""Pass rates of a policy on training prompts, from several answers to each."""

from __future__ import annotations

import dataclasses
import shutil
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import pandas as pd

from rlcore.config import AnswersConfig
from rlcore.data_contracts.contracts.contract import require
from rlcore.data_contracts.contracts.results import DIFFICULTIES
from rlcore.evaluation.intervals import Interval, accuracy, mean_fraction
from rlcore.sampling.rejection import Candidate
from rlcore.tasks.drawing.levels import format_interval
from rlcore.tasks.steps.base import StageContext, StageResult
from rlcore.tasks.steps.rows import id_in_dataset
from rlcore.tasks.steps.sampled_answers import answered_prompts
from rlcore.tasks.store.storage import write_json, write_table
from rlcore.types import Prompt

TABLE = "difficulty.parquet"


def run_difficulty(context: StageContext, *, policy: str) -> StageResult:
    """Sample from the checkpoint of the stage ``policy``. The artifact has each prompt's pass rate and a summary.

    Raises:
        RewardError: the grader fails too often.
    """
    config: AnswersConfig = context.config.stage.settings
    prompts, candidates, _ = answered_prompts(context, policy)
    table = difficulties(candidates, prompts, threshold=config.threshold, confidence=context.config.confidence)
    require(table, DIFFICULTIES)
    write_table(table, context.folder / TABLE)
    shutil.copytree(context.work / "chunks", context.folder / "rollouts")
    found = summarize(table, asked=len(prompts), seed=context.seed, confidence=context.config.confidence)
    document = {"policy": context.config.stage.policy, "num_samples": config.num_samples, **found}
    write_json(document, context.folder / "difficulty.json")
    context.tracker.log_artifact(context.folder / "difficulty.json", "data")
    rate = found["pass_rate"]
    interval = format_interval(rate["low"], rate["high"], context.config.confidence)
    context.log(f"pass_rate={rate['mean']:.3f} {interval} n={len(table)}")
    return StageResult(metrics=metrics_of(found), rows=len(table), contract=DIFFICULTIES.name)


def difficulties(
    candidates: Sequence[Candidate], prompts: Sequence[Prompt], *, threshold: float, confidence: float
) -> pd.DataFrame:
    """Return a row of ``difficulties/v1`` for each prompt with a scored answer. Answers to one prompt are adjacent."""
    asked, several = {prompt.prompt_id: prompt for prompt in prompts}, len({each.dataset for each in prompts}) > 1
    rows = []
    for name, group in groupby(candidates, key=lambda one: one.prompt_id):
        scores = [one.value for one in group if one.value is not None]
        if scores:
            rate: Interval = accuracy([score >= threshold for score in scores], confidence=confidence)
            rows.append(
                {
                    "dataset": asked[name].dataset,
                    "prompt_id": id_in_dataset(asked[name], is_one_of_several=several),
                    "task": asked[name].task,
                    "answers": rate.n,
                    "passed": sum(score >= threshold for score in scores),
                    "pass_rate": rate.mean,
                    "low": rate.low,
                    "high": rate.high,
                    "reward": sum(scores) / len(scores),
                }
            )
    return pd.DataFrame(rows)


def summarize(table: pd.DataFrame, *, asked: int, seed: int, confidence: float) -> dict[str, Any]:
    """Summarize a table of pass rates. ``asked``: number of prompts, including those without a scored answer."""
    rates = table["pass_rate"].tolist()
    counts = Counter(rates)
    return {
        "prompts": len(table),
        "unscored": asked - len(table),
        "answers": int(table["answers"].sum()),
        "pass_rate": dataclasses.asdict(mean_fraction(rates, seed=seed, confidence=confidence)),
        "never": counts[0.0],
        "always": counts[1.0],
        "histogram": [[rate, counts[rate]] for rate in sorted(counts)],
        "tasks": {task: [len(part), float(part.mean())] for task, part in table.groupby("task")["pass_rate"]},
    }


def metrics_of(found: dict[str, Any]) -> dict[str, float]:
    """Return the stage's metrics by their glossary names."""
    rate, prompts = found["pass_rate"], found["prompts"]
    return {
        "difficulty/prompts": float(prompts),
        "difficulty/answers": float(found["answers"]),
        "difficulty/pass_rate": rate["mean"],
        "difficulty/pass_rate_low": rate["low"],
        "difficulty/pass_rate_high": rate["high"],
        "difficulty/never_solved": found["never"] / prompts,
        "difficulty/always_solved": found["always"] / prompts,
    }
