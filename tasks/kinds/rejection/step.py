"""Rejection sampling: a policy answers each training prompt several times, and good answers become demonstrations."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from functools import partial
from typing import Any

from rlcore.config import RejectionConfig
from rlcore.data_contracts.gate.data_gate import GateLimits, GateReport
from rlcore.data_contracts.gate.reading import source_of
from rlcore.errors import DataError
from rlcore.evaluation.intervals import with_bounds
from rlcore.sampling.rejection import Candidate, RejectionStats, Selection, select, summarize
from rlcore.tasks.kinds.data.step import evaluated_prompts, log_to_mlflow, token_meter
from rlcore.tasks.steps.base import StageContext, StageResult
from rlcore.tasks.steps.data import prepare_source
from rlcore.tasks.steps.sampled_answers import answer_name, answered_prompts
from rlcore.tasks.store.storage import write_json
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Prompt

MAX_QUARANTINED = 0.01  # answers were already checked for length and control tokens
SOURCE = "rejection sampling"


def run_rejection(context: StageContext, *, policy: str, held_out: tuple[str, ...]) -> StageResult:
    """Sample from the checkpoint of the stage ``policy``. The artifact is a dataset of demonstrations with a summary.

    No demonstration answers a prompt that the stages ``held_out`` keep for evaluation.
    Raises:
        DataError: answers to fewer than two prompts were kept.
        RewardError: the grader fails too often.
    """
    config: RejectionConfig = context.config.stage.settings
    prompts, candidates, tokenizer = answered_prompts(context, policy)
    selection = select(candidates, config, seed=context.seed)
    require_enough(selection, len(candidates), where=f"stages.{context.stage}")
    report = write_demonstrations(context, selection, prompts, tokenizer, held_out)
    shutil.copytree(context.work / "chunks", context.folder / "rollouts")
    return write_summary(context, candidates, selection, report)


def require_enough(selection: Selection, sampled: int, *, where: str) -> None:
    """Reject a selection that cannot be divided into training and held-out prompts.

    Raises:
        DataError: with the reasons why answers were dropped.
    """
    if len({one.prompt_id for one in selection.kept}) < 2:
        went = ", ".join(f"{count} {reason}" for reason, count in selection.dropped.items() if count)
        raise DataError(
            f"rejection sampling kept {len(selection.kept)} of {sampled} answers: {went}",
            where=where,
            fix="train the policy longer, raise num_samples or max_new_tokens, lower threshold, or choose = 'best'",
        )


def write_demonstrations(
    context: StageContext,
    selection: Selection,
    prompts: Sequence[Prompt],
    tokenizer: ChatTokenizer,
    held_out: Sequence[str],
) -> GateReport:
    """Write the kept answers through the contract ``demonstrations/v1``, without answers to evaluation prompts."""
    config: RejectionConfig = context.config.stage.settings
    by_id = {prompt.prompt_id: prompt for prompt in prompts}
    role, prefill = config.sampling.episodes.tool_role, tokenizer.prefill
    rows = [demonstration(by_id[one.prompt_id], one, prefill, tool_role=role) for one in selection.kept]
    num_eval = max(1, min(config.num_eval, len(rows) // 10))
    limits = GateLimits(
        num_train=len(rows) - num_eval,
        num_eval=num_eval,
        max_tokens=max(data.max_tokens for data in context.config.data.values()) + config.sampling.max_new_tokens,
        max_quarantined=MAX_QUARANTINED,
        evaluated=evaluated_prompts(context, held_out),
        seed=context.seed,
    )
    snapshot = context.work / "snapshot"  # keeps quarantine and report if the gate rejects
    tokens = token_meter(tokenizer)
    source = source_of(SOURCE, rows)
    report = prepare_source("demonstrations", source, limits, adapter="demonstrations", tokens=tokens, folder=snapshot)
    shutil.copytree(snapshot, context.folder, dirs_exist_ok=True)
    log_to_mlflow(context, report)
    return report


def demonstration(prompt: Prompt, kept: Candidate, prefill: str, *, tool_role: str = "tool") -> dict[str, Any]:
    """Return a kept answer as a row of demonstrations, with the template's ``prefill``.

    The answer's tool calls are turns before it, each followed by the tool's output as a message of ``tool_role``.
    """
    messages = [{"role": message.role, "content": message.content} for message in prompt.messages]
    for turn, output in kept.calls:
        turn_message = {"role": "assistant", "content": prefill + turn}
        messages += [turn_message, {"role": tool_role, "content": output}]
    return {
        "demonstration_id": answer_name(kept.prompt_id, kept.sample_index),
        "messages": messages,
        "completion": prefill + kept.text,
        "reference": prompt.reference,
        "task": prompt.task,
    }


def write_summary(
    context: StageContext, candidates: Sequence[Candidate], selection: Selection, report: GateReport
) -> StageResult:
    """Write ``rejection.json``, and return the stage's result."""
    config: RejectionConfig = context.config.stage.settings
    figure = partial(summarize, config=config, seed=context.seed, confidence=context.config.confidence)
    total = figure(candidates, selection.kept)
    tasks = {
        task: figure(
            [one for one in candidates if one.task == task], [one for one in selection.kept if one.task == task]
        )
        for task in sorted({one.task for one in candidates})
    }
    document = {
        "all": dataclasses.asdict(total),
        "dropped": dict(selection.dropped),
        "tasks": {task: dataclasses.asdict(each) for task, each in tasks.items()},
        "contract": report.contract,
        "accepted": report.accepted,
        "train": report.num_train,
        "eval": report.num_eval,
    }
    write_json(document, context.folder / "rejection.json")
    context.tracker.log_artifact(context.folder / "rejection.json", "data")
    context.log(f"kept={total.kept} verified={total.verified} sampled={total.sampled}")
    return StageResult(metrics=metrics_of(total), rows=report.num_train + report.num_eval, contract=report.contract)


def metrics_of(total: RejectionStats) -> dict[str, float]:
    """Return the stage's metrics by their glossary names."""
    return {
        "rejection/sampled": float(total.sampled),
        "rejection/verified": float(total.verified),
        "rejection/kept": float(total.kept),
        **with_bounds("rejection/pass_rate", total.pass_rate),
        "rejection/solved": total.solved.mean,
    }
