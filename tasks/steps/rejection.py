"""Rejection sampling: a policy answers the training prompts many times, and its good answers become demonstrations.

Answers are sampled in chunks of prompts. Each chunk is one file in the work folder, written whole or not at all, and
its draws are a function of (seed, chunk): a killed run goes on with the next chunk and ends with the same bytes.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from data_contracts.gate import GateLimits, GateReport
from data_contracts.reading import source_of
from rlcore.canaries import mask_canary
from rlcore.config import RejectionConfig
from rlcore.errors import DataError, RewardError
from rlcore.rejection import Candidate, Selection, Yield, account, select
from rlcore.rewards.base import RewardFn, check_error_rate
from rlcore.rewards.table import build_rewards
from rlcore.sampling.base import Sampler, SamplingParams
from rlcore.sampling.vllm.weights import max_positions
from rlcore.seeding import derive_seed, shuffled
from rlcore.tokenization import ChatTokenizer
from rlcore.types import Prompt, Rollout, ScoredRollout
from tasks.home.storage import read_json, read_table, write_json
from tasks.steps.base import MODEL, StageContext, StageResult
from tasks.steps.data import prepare_source
from tasks.steps.episodes import with_tools
from tasks.steps.prepare import evaluated_prompts, record, token_view
from tasks.steps.rewards import open_reward_models, reward_resources
from tasks.steps.rl_records import write_rollouts
from tasks.steps.rollout_engine import Workload, longest, open_engine, sampling_engine
from tasks.steps.runtime import open_runtime
from tasks.steps.tokens import check_context, read_prompt_sets

PROMPTS_PER_CHUNK = 64
MAX_QUARANTINED = 0.01  # answers were held against length and control tokens already
SOURCE = "rejection sampling"
CALLS = ".calls.json"  # beside a chunk's table, where policies call tools


def run_rejection(context: StageContext, *, policy: str, held_out: tuple[str, ...]) -> StageResult:
    """Sample from the checkpoint of the stage ``policy``; the artifact is a dataset of demonstrations and its account.

    None of them answers a prompt that the stages ``held_out`` keep for evaluation.

    Raises:
        DataError: no answers to at least two prompts were kept.
        RewardError: the grader fails too often.
    """
    config: RejectionConfig = context.config.stage.settings
    folder = context.inputs[policy] / MODEL
    tokenizer = ChatTokenizer.load(folder)
    prompts = chosen_prompts(context, config, tokenizer)
    sample_chunks(context, prompts, tokenizer=tokenizer, folder=folder)
    candidates = read_candidates(chunk_paths(context, len(prompts)), prompts, tokenizer)
    selection = select(candidates, config, seed=context.seed)
    require_enough(selection, len(candidates), where=f"stages.{context.stage}")
    report = write_demonstrations(context, selection, prompts, tokenizer, held_out)
    shutil.copytree(context.work / "chunks", context.folder / "rollouts")
    return give_account(context, candidates, selection, report)


def chosen_prompts(context: StageContext, config: RejectionConfig, tokenizer: ChatTokenizer) -> list[Prompt]:
    """The training prompts, or ``num_prompts`` of them that the seed chooses, in an order of its own."""
    prompts = read_prompt_sets(context, context.config.stage.data, "train", tokenizer)
    order = shuffled(len(prompts), context.seed, "rejection")[: config.num_prompts or None]
    return [prompts[place] for place in order]


def chunk_paths(context: StageContext, num_prompts: int) -> list[Path]:
    """The file of each chunk, whether it is there or not."""
    count = math.ceil(num_prompts / PROMPTS_PER_CHUNK)
    return [context.work / "chunks" / f"chunk-{number:05d}.parquet" for number in range(count)]


def sample_chunks(context: StageContext, prompts: Sequence[Prompt], *, tokenizer: ChatTokenizer, folder: Path) -> None:
    """Sample from the checkpoint in ``folder`` and score, chunk by chunk, those that are not on disk yet."""
    config: RejectionConfig = context.config.stage.settings
    paths = chunk_paths(context, len(prompts))
    done = sum(path.exists() for path in paths)
    if done:
        context.progress(f"goes on after {done} of {len(paths)} chunks")
    key = f"stages.{context.stage}.sampling.max_new_tokens"
    check_context(max_positions(folder), prompts, config.sampling.max_new_tokens, key=key)
    with ExitStack() as stack:
        runtime = stack.enter_context(open_runtime(context.config.hardware, seed=context.seed))
        models, budget = open_reward_models(context, config.rewards, runtime), config.tokens_per_microbatch
        resources = reward_resources(models, tokens_per_microbatch=budget, prefill=tokenizer.prefill)
        reward = stack.enter_context(build_rewards(config.rewards, resources=resources))
        engine = stack.enter_context(
            open_engine(
                folder,
                tokenizer,
                config=sampling_engine(config.sampling),
                work=Workload(
                    max_concurrent=config.sampling.max_concurrent,
                    max_tokens=longest(prompts, config.sampling.max_new_tokens),
                ),
                runtime=runtime,
                progress=context.progress,
            )
        )
        sampler = stack.enter_context(with_tools(engine, tokenizer, config.sampling.episodes))
        for number, path in enumerate(paths):
            if path.exists():
                continue
            chunk = prompts[number * PROMPTS_PER_CHUNK : (number + 1) * PROMPTS_PER_CHUNK]
            seed = derive_seed(context.seed, "rejection", number)
            groups = score_groups(sample_groups(sampler, chunk, config, seed=seed), reward)
            refuse_failing_grader(groups, path)
            mask_canary([item.rollout for group in groups for item in group], tokenizer.eos_ids)
            if config.sampling.episodes.tools:
                write_json(calls_of(groups), path.with_suffix(CALLS))
            write_rollouts(path, number, groups)
            context.advance("rejection chunks", number + 1, len(paths))


def sample_groups(
    sampler: Sampler, prompts: Sequence[Prompt], config: RejectionConfig, *, seed: int
) -> list[list[Rollout]]:
    """The answers to each prompt; what the engine could not produce is left out."""
    params = SamplingParams(
        temperature=config.sampling.temperature,
        max_new_tokens=config.sampling.max_new_tokens,
        num_samples=config.num_samples,
    )
    groups = sampler.sample(prompts, params, seed=seed)
    return [[one for one in group if isinstance(one, Rollout)] for group in groups]


def score_groups(groups: Sequence[Sequence[Rollout]], reward: RewardFn) -> list[list[ScoredRollout]]:
    """Scores in one batched call."""
    scores = iter(reward([rollout for group in groups for rollout in group]))
    return [[ScoredRollout(rollout=rollout, score=next(scores)) for rollout in group] for group in groups]


def refuse_failing_grader(groups: Sequence[Sequence[ScoredRollout]], path: Path) -> None:
    """Stop the run if the grader fails too often; the rollouts with their errors are then in a separate table.

    Raises:
        RewardError: the grader fails on more than a tenth of the rollouts.
    """
    try:
        check_error_rate([item.score for group in groups for item in group])
    except RewardError as error:
        table = path.parent.with_name("not_scored") / path.name  # no chunk: a run that goes on scores them again
        write_rollouts(table, 0, groups)
        raise RewardError(error.what, where=str(table), fix=error.fix) from error


def calls_of(groups: Sequence[Sequence[ScoredRollout]]) -> dict[str, dict[str, Any]]:
    """The last turn of each answer, and its calls with the tools' output; a table of rollouts has them as one text."""
    return {
        answer_name(item.rollout.prompt.prompt_id, index): {
            "text": item.rollout.text,
            "calls": [[call.text, call.output] for call in item.rollout.tool_calls],
        }
        for group in groups
        for index, item in enumerate(group)
    }


def answer_name(prompt_id: str, sample_index: int) -> str:
    """The name of an answer, which is that of its demonstration."""
    return f"{prompt_id}/{sample_index}"


def read_candidates(paths: Sequence[Path], prompts: Sequence[Prompt], tokenizer: ChatTokenizer) -> list[Candidate]:
    """Every sampled answer, as the pure part wants it."""
    tasks = {prompt.prompt_id: prompt.task for prompt in prompts}
    controls = tuple(tokenizer.special_tokens)
    found = []
    for path in paths:
        turns = read_json(path.with_suffix(CALLS)) if path.with_suffix(CALLS).is_file() else {}
        for row in read_table(path).to_dict("records"):
            said = turns.get(answer_name(row["prompt_id"], row["sample_index"]), {"text": row["text"], "calls": []})
            calls = tuple((turn, output) for turn, output in said["calls"])
            found.append(
                Candidate(
                    prompt_id=row["prompt_id"],
                    task=tasks[row["prompt_id"]],
                    sample_index=row["sample_index"],
                    text=said["text"],
                    num_tokens=len(row["completion_ids"]),
                    value=None if math.isnan(row["value"]) else row["value"],
                    is_whole=row["finish_reason"] == "stop",
                    is_usable=all(is_usable(text, controls) for text in (said["text"], *chain(*calls))),
                    calls=calls,
                )
            )
    return found


def is_usable(text: str, controls: Sequence[str]) -> bool:
    """Whether the contract would take the text: a policy may answer nothing, or spell out a control token."""
    return bool(text.strip()) and "\0" not in text and not any(control in text for control in controls)


def require_enough(selection: Selection, sampled: int, *, where: str) -> None:
    """Refuse a selection that cannot be divided into training and held-out prompts.

    Raises:
        DataError: saying where the answers went.
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
    """The kept answers through the contract ``demonstrations/v1``; none may answer an evaluation prompt."""
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
    snapshot = context.work / "snapshot"  # when the gate refuses, quarantine and report stay where the error says
    view = token_view(tokenizer)
    source = source_of(SOURCE, rows)
    report = prepare_source("demonstrations", source, limits, adapter="demonstrations", tokens=view, folder=snapshot)
    shutil.copytree(snapshot, context.folder, dirs_exist_ok=True)
    record(context, report)
    return report


def demonstration(prompt: Prompt, kept: Candidate, prefill: str, *, tool_role: str = "tool") -> dict[str, Any]:
    """A kept answer as a row of demonstrations. It includes ``prefill``, which the template writes before a turn.

    The answer's calls are turns before it, each followed by the tool's output as a message of ``tool_role``.
    """
    messages = [{"role": message.role, "content": message.content} for message in prompt.messages]
    for turn, output in kept.calls:
        said = {"role": "assistant", "content": prefill + turn}
        messages += [said, {"role": tool_role, "content": output}]
    return {
        "demonstration_id": answer_name(kept.prompt_id, kept.sample_index),
        "messages": messages,
        "completion": prefill + kept.text,
        "reference": prompt.reference,
        "task": prompt.task,
    }


def give_account(
    context: StageContext, candidates: Sequence[Candidate], selection: Selection, report: GateReport
) -> StageResult:
    """What was sampled, verified and kept, in all and by task: ``rejection.json`` and the stage's figures."""
    config: RejectionConfig = context.config.stage.settings
    figure = partial(account, config=config, seed=context.seed, confidence=context.config.confidence)
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
    context.progress(f"{total.kept} of {total.sampled} answers kept, {total.verified} verified")
    return StageResult(metrics=figures(total), rows=report.num_train + report.num_eval, contract=report.contract)


def figures(total: Yield) -> dict[str, float]:
    """The stage's metrics, by the glossary's names."""
    return {
        "rejection/sampled": float(total.sampled),
        "rejection/verified": float(total.verified),
        "rejection/kept": float(total.kept),
        "rejection/pass_rate": total.pass_rate.mean,
        "rejection/pass_rate_low": total.pass_rate.low,
        "rejection/pass_rate_high": total.pass_rate.high,
        "rejection/solved": total.solved.mean,
    }
