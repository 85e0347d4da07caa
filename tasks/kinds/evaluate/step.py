"""Held-out evaluation of a checkpoint: greedy accuracy, sampled accuracy and pass@k, with intervals."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import pandas as pd

from rlcore.checks.canaries.served_weights import verify_served_weights
from rlcore.checks.settings import check_context
from rlcore.config import AgentConfig
from rlcore.data_contracts.contracts.contract import require
from rlcore.data_contracts.contracts.results import EVALUATIONS
from rlcore.evaluation.intervals import (
    accuracy,
    dataset_accuracy,
    dataset_scores,
    mean_fraction,
    pass_at_k,
    with_bounds,
)
from rlcore.models.architectures import positions_of
from rlcore.models.integrity import verify_model
from rlcore.rewards.base import RewardFn, failed_score, score_each
from rlcore.sampling.base import Sampler, SamplingParams
from rlcore.seeding import derive_seed
from rlcore.tasks.drawing.levels import format_interval
from rlcore.tasks.presets.settings import EvaluationConfig
from rlcore.tasks.steps.base import MODEL, StageContext, StageResult
from rlcore.tasks.steps.rewards import verifier
from rlcore.tasks.steps.rollout_engine import longest, open_engine, open_player
from rlcore.tasks.steps.rows import read_prompt_sets
from rlcore.tasks.steps.runtime import Workload, open_runtime
from rlcore.tasks.store.storage import write_table
from rlcore.types import CORRECT_FROM, FailedRollout, Prompt, Rollout, Score, is_correct


def run_evaluate(context: StageContext, *, checkpoint: str) -> StageResult:
    """Evaluate the checkpoint of the stage ``checkpoint`` on the held-out prompts of the evaluated datasets."""
    model = context.inputs[checkpoint]
    config: EvaluationConfig = context.config.evaluation
    tokenizer = verify_model(model, stage=checkpoint, model=model / MODEL)
    prompts = read_prompt_sets(context, config.data, "eval", tokenizer, limit=config.num_problems)
    check_context(positions_of(model / MODEL), prompts, config.max_new_tokens, key="evaluation.max_new_tokens")
    agent: AgentConfig | None = context.config.declared.get("agent")
    max_tokens = longest(prompts, config.max_new_tokens, agent)
    with ExitStack() as stack:
        runtime = stack.enter_context(open_runtime(context.config.hardware, seed=context.seed))
        grade = Grader(config, stack.enter_context(verifier(context, runtime, prefill=tokenizer.prefill)))
        engine = stack.enter_context(
            open_engine(
                model / MODEL,
                tokenizer,
                config=context.config.engine,
                work=Workload(max_concurrent=config.max_concurrent, max_tokens=max_tokens),
                runtime=runtime,
                progress=context.log,
            )
        )
        verify_served_weights(engine, model / MODEL, prompts, runtime, seed=derive_seed(context.seed, "served"))
        sampler = stack.enter_context(open_player(engine, tokenizer, context.config.episodes, agent))
        greedy = SamplingParams(temperature=1.0, max_new_tokens=config.max_new_tokens, num_samples=1, greedy=True)
        table = answers(sampler, prompts, greedy, grade, seed=0)
        if config.num_samples:
            sampled = SamplingParams(
                temperature=config.temperature, max_new_tokens=config.max_new_tokens, num_samples=config.num_samples
            )
            seed = derive_seed(context.seed, "evaluation")
            count = min(config.num_problems, config.num_sampled_problems)
            chosen = read_prompt_sets(context, config.data, "eval", tokenizer, limit=count)
            table = pd.concat([table, answers(sampler, chosen, sampled, grade, seed=seed)], ignore_index=True)
    require(table, EVALUATIONS)
    write_table(table, context.folder / "answers.parquet")
    greedy_rows = table[(table["mode"] == "greedy") & table["is_graded"]]
    graded = [prompt.dataset for prompt in prompts if grade.can_grade(prompt)]
    by_data = dataset_accuracy(graded, greedy_rows["correct"].tolist())
    scores = dataset_scores(graded, greedy_rows["value"].tolist(), config.limits(config.data))
    summary = summarise(table, config, seed=context.seed) | by_data | scores
    (context.folder / "summary.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
    context.tracker.log_metrics(summary, step=0)
    context.tracker.log_artifact(context.folder / "answers.parquet", "answers")
    context.log(log_line(summary, config.confidence))
    return StageResult(metrics=summary, rows=len(table), contract=EVALUATIONS.name)


def log_line(summary: Mapping[str, float], confidence: float) -> str:
    """Format the greedy accuracy with its interval and the number of prompts without reference."""
    without = int(summary["eval/no_reference"])
    left_out = f"no_reference={without}" if without else ""
    if "eval/accuracy" not in summary:
        return left_out
    interval = format_interval(summary["eval/accuracy_low"], summary["eval/accuracy_high"], confidence)
    return f"accuracy={summary['eval/accuracy']:.3f} {interval} n={summary['eval/problems']:.0f} {left_out}".rstrip()


class Grader:
    """Verifiers of an evaluation, each for its datasets."""

    def __init__(self, config: EvaluationConfig, verify: RewardFn) -> None:
        self._config, self._verify = config, verify

    def can_grade(self, prompt: Prompt) -> bool:
        """Return False if the prompt has no reference answer and its verifier needs one."""
        return self._config.grades(prompt.dataset, has_reference=prompt.has_reference)

    def scores(self, rollouts: Sequence[Rollout | FailedRollout]) -> Iterator[tuple[Score, bool]]:
        """Yield the score of each rollout, and whether its answer is correct."""
        limits = self._config.limits([rollout.prompt.dataset for rollout in rollouts])
        graded = iter(score_each([each for each in rollouts if self.can_grade(each.prompt)], self._verify))
        for rollout in rollouts:
            score = next(graded) if self.can_grade(rollout.prompt) else failed_score("the prompt has no reference")
            yield score, is_correct(score, limits.get(rollout.prompt.dataset, CORRECT_FROM))


def answers(
    sampler: Sampler, prompts: Sequence[Prompt], params: SamplingParams, grade: Grader, *, seed: int
) -> pd.DataFrame:
    """Return a row per completion. A problem without answer or grade counts as wrong, with its reason.

    Prompts without reference answer are answered but not graded if their verifier needs one.
    """
    groups = sampler.sample(prompts, params, seed=seed)
    flat = [(index, rollout) for group in groups for index, rollout in enumerate(group)]
    rows: list[dict[str, Any]] = []
    for (index, rollout), (score, correct) in zip(flat, grade.scores([each for _, each in flat]), strict=True):
        row: dict[str, Any] = {
            "prompt_id": rollout.prompt.prompt_id,
            "task": rollout.prompt.task,
            "mode": "greedy" if params.greedy else "sampled",
            "sample_index": index,
            "is_graded": grade.can_grade(rollout.prompt),
            "correct": correct,
            "value": float("nan") if score.value is None else score.value,
        }
        if isinstance(rollout, Rollout):
            row |= {
                "completion": rollout.transcript,
                "num_tokens": len(rollout.completion_ids),
                "finish_reason": rollout.finish_reason,
            }
        else:
            row |= {"completion": rollout.reason, "num_tokens": 0, "finish_reason": "length"}
        rows.append(row)
    return pd.DataFrame(rows)


def summarise(table: pd.DataFrame, config: EvaluationConfig, *, seed: int) -> dict[str, float]:
    """Return metrics over problems: with Wilson's interval for greedy, a bootstrap over problems for sampled accuracy.

    Accuracies cover the problems that can be graded, and are absent if there is none.
    """
    greedy = table[table["mode"] == "greedy"]
    graded = greedy[greedy["is_graded"]]
    summary = {
        "eval/problems": float(len(graded)),
        "eval/no_reference": float(len(greedy) - len(graded)),
        "eval/failed": float(((graded["value"].isna()) | (graded["num_tokens"] == 0)).sum()),
        "completion/length": float(greedy["num_tokens"].mean()),
        "completion/truncated": float((greedy["finish_reason"] == "length").mean()),
    }
    if graded.empty:
        return summary
    summary |= with_bounds("eval/accuracy", accuracy(graded["correct"].tolist(), confidence=config.confidence))
    sampled = table[(table["mode"] == "sampled") & table["is_graded"]]
    if len(sampled):
        right = sampled.groupby("prompt_id", sort=True)["correct"].agg(["sum", "size"])
        for k in sorted({1, config.num_samples}):
            values = [pass_at_k(int(n), int(c), k) for c, n in right.itertuples(index=False)]
            mean = mean_fraction(values, confidence=config.confidence, seed=seed)
            summary |= with_bounds(f"eval/pass_at_{k}", mean)
    return summary
