"""Answers of a policy to prompts: sampled and scored in chunks, each an atomic table.

The draws of a chunk depend only on (seed, chunk): a resumed run continues with the next chunk and ends with the same
bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from rlcore.checks.canaries.masks import mask_canary
from rlcore.checks.settings import check_context
from rlcore.config import AnswersConfig, SamplingConfig
from rlcore.data_contracts.characters import has_visible
from rlcore.environments.episodes import EpisodeSampler
from rlcore.errors import ConfigError, RewardError
from rlcore.models.architectures import positions_of
from rlcore.models.integrity import verify_model
from rlcore.models.runtime import Runtime
from rlcore.rewards.base import check_error_rate, score_groups
from rlcore.rewards.table import build_rewards
from rlcore.sampling.base import Sampler, SamplingParams
from rlcore.sampling.rejection import Candidate
from rlcore.seeding import derive_seed, shuffled
from rlcore.tasks.steps.base import MODEL, StageContext
from rlcore.tasks.steps.rewards import open_reward_models, reward_resources
from rlcore.tasks.steps.rl_recorder import write_rollouts
from rlcore.tasks.steps.rollout_engine import longest, open_engine, open_player, sampling_engine
from rlcore.tasks.steps.rows import read_episodes, read_prompt_sets
from rlcore.tasks.steps.runtime import Workload, open_runtime
from rlcore.tasks.store.storage import matches_digest, note_digest, read_json, write_json
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Prompt, Rollout, ScoredRollout

PROMPTS_PER_CHUNK = 64
CALLS = ".calls.json"  # next to a chunk's table, if policies call tools


class SampledAnswers(NamedTuple):
    """Sampled prompts, all answers to them, and the tokenizer of both."""

    prompts: Sequence[Prompt]
    candidates: Sequence[Candidate]
    tokenizer: ChatTokenizer


def answered_prompts(context: StageContext, policy: str) -> SampledAnswers:
    """Return training prompts, shuffled, with the scored answers of the checkpoint of the stage ``policy``.

    The seed chooses ``num_prompts`` of them.

    Raises:
        RewardError: the grader fails too often.
    """
    folder = context.inputs[policy] / MODEL
    tokenizer = verify_model(context.inputs[policy], stage=policy, model=folder)
    stage = context.config.stage
    every = read_prompt_sets(context, stage.data, "train", tokenizer)
    order = shuffled(len(every), context.seed, stage.kind)[: stage.settings.num_prompts or None]
    prompts = [every[place] for place in order]
    sample_chunks(context, prompts, tokenizer=tokenizer, folder=folder)
    candidates = read_candidates(chunk_paths(context, len(prompts)), prompts, tokenizer)
    return SampledAnswers(prompts, candidates, tokenizer)


def chunk_paths(context: StageContext, num_prompts: int) -> list[Path]:
    """Return the file of each chunk."""
    count = math.ceil(num_prompts / PROMPTS_PER_CHUNK)
    return [context.work / "chunks" / f"chunk-{number:05d}.parquet" for number in range(count)]


def sample_chunks(context: StageContext, prompts: Sequence[Prompt], *, tokenizer: ChatTokenizer, folder: Path) -> None:
    """Sample from the checkpoint in ``folder`` and score the chunks that are not on disk yet."""
    config: AnswersConfig = context.config.stage.settings
    kind: str = context.config.stage.kind
    paths = chunk_paths(context, len(prompts))
    intact = {path for path in paths if matches_digest(path) and not _has_other_calls(path)}
    if intact:
        context.log(f"resume: {len(intact)} of {len(paths)} chunks are complete")
    with ExitStack() as stack:
        runtime = stack.enter_context(open_runtime(context.config.hardware, seed=context.seed))
        models, budget = open_reward_models(context.inputs, config.rewards, runtime), config.tokens_per_microbatch
        resources = reward_resources(models, tokens_per_microbatch=budget, prefill=tokenizer.prefill)
        reward = stack.enter_context(build_rewards(config.rewards, resources=resources))
        _, sampler = stack.enter_context(open_sampling(context, folder, prompts, tokenizer, runtime))
        if context.config.stage.produces == "demonstrations":
            refuse_changed_prompts(context, sampler, "demonstrations cannot hold such a prompt")
        for number, path in enumerate(paths):
            if path in intact:
                continue
            chunk = prompts[number * PROMPTS_PER_CHUNK : (number + 1) * PROMPTS_PER_CHUNK]
            seed = derive_seed(context.seed, kind, number)
            groups = score_groups(reward, sample_groups(sampler, chunk, config, seed=seed))
            refuse_failing_grader(groups, path)
            mask_canary([item.rollout for group in groups for item in group], tokenizer.eos_ids)
            if config.sampling.episodes.has_tools:
                write_json(calls_of(groups), path.with_suffix(CALLS))
                note_digest(path.with_suffix(CALLS))
            write_rollouts(path, number, groups)
            note_digest(path)
            context.report_progress(f"{kind} chunks", number + 1, len(paths))


@contextmanager
def open_sampling(
    context: StageContext, folder: Path, prompts: Sequence[Prompt], tokenizer: ChatTokenizer, runtime: Runtime
) -> Iterator[tuple[Sampler, Sampler]]:
    """Open the engine of a stage's ``sampling`` on the checkpoint in ``folder``, and the player of episodes on it.

    Raises:
        ConfigError: a prompt with its completion exceeds the model's positions.
    """
    sampling: SamplingConfig = context.config.stage.settings.sampling
    key = f"stages.{context.stage}.sampling.max_new_tokens"
    check_context(positions_of(folder), prompts, sampling.max_new_tokens, key=key)
    work = Workload(max_concurrent=sampling.max_concurrent, max_tokens=longest(prompts, sampling.max_new_tokens))
    config = sampling_engine(sampling)
    with (
        open_engine(folder, tokenizer, config=config, work=work, runtime=runtime, progress=context.log) as engine,
        open_player(engine, tokenizer, sampling.episodes) as sampler,
    ):
        yield engine, sampler


def refuse_changed_prompts(context: StageContext, sampler: Sampler, why: str) -> None:
    """Reject episodes whose answers answer another prompt than the row's, which derived data would not contain.

    ``why``: the data that cannot be derived.
    Raises:
        ConfigError: the chat template declares tools in the prompt, or an environment adds its first observation.
    """
    if isinstance(sampler, EpisodeSampler) and sampler.changes_prompts:
        raise ConfigError(
            f"declared tools or an environment's first observation change the prompt, and {why}",
            where=f"stages.{context.stage}.sampling.episodes",
            fix="set call_format = 'ours', say in data.<name>.system_prompt how a call is written, and name no "
            "environment",
        )


def _has_other_calls(path: Path) -> bool:
    calls = path.with_suffix(CALLS)
    return calls.exists() and not matches_digest(calls)


def sample_groups(
    sampler: Sampler, prompts: Sequence[Prompt], config: AnswersConfig, *, seed: int
) -> list[list[Rollout]]:
    """Return the answers to each prompt, without those that the engine failed to produce."""
    params = SamplingParams(
        temperature=config.sampling.temperature,
        max_new_tokens=config.sampling.max_new_tokens,
        num_samples=config.num_samples,
    )
    groups = sampler.sample(prompts, params, seed=seed)
    return [[one for one in group if isinstance(one, Rollout)] for group in groups]


def refuse_failing_grader(groups: Sequence[Sequence[ScoredRollout]], path: Path) -> None:
    """Stop the run if the grader fails too often. Its errors are then in a separate table.

    Raises:
        RewardError: the grader fails on more than a tenth of the rollouts.
    """
    try:
        check_error_rate([item.score for group in groups for item in group])
    except RewardError as error:
        table = path.parent.with_name("not_scored") / path.name  # no chunk: a resumed run scores them again
        write_rollouts(table, 0, groups)
        raise RewardError(error.what, where=str(table), fix=error.fix) from error


def calls_of(groups: Sequence[Sequence[ScoredRollout]]) -> dict[str, dict[str, Any]]:
    """Split answers into their last turns and tool calls with outputs, which a rollout table joins to one text."""
    return {
        answer_name(item.rollout.prompt.prompt_id, index): {
            "text": item.rollout.text,
            "calls": [[call.text, call.output] for call in item.rollout.tool_calls],
        }
        for group in groups
        for index, item in enumerate(group)
    }


def answer_name(prompt_id: str, sample_index: int) -> str:
    """Return the name of an answer, which its demonstration keeps."""
    return f"{prompt_id}/{sample_index}"


def read_candidates(paths: Sequence[Path], prompts: Sequence[Prompt], tokenizer: ChatTokenizer) -> list[Candidate]:
    """Read all sampled answers as candidates for selection."""
    tasks = {prompt.prompt_id: prompt.task for prompt in prompts}
    controls = tuple(tokenizer.special_tokens)
    found = []
    for path in paths:
        turns = read_json(path.with_suffix(CALLS)) if path.with_suffix(CALLS).is_file() else {}
        for row in read_episodes(path).to_dict("records"):
            answer = turns.get(answer_name(row["prompt_id"], row["sample_index"]), {"text": row["text"], "calls": []})
            calls = tuple((turn, output) for turn, output in answer["calls"])
            found.append(
                Candidate(
                    prompt_id=row["prompt_id"],
                    task=tasks[row["prompt_id"]],
                    sample_index=row["sample_index"],
                    text=answer["text"],
                    num_tokens=len(row["completion_ids"]),
                    value=None if math.isnan(row["value"]) else row["value"],
                    is_finished=row["finish_reason"] == "stop",
                    is_usable=all(is_usable(text, controls) for text in (answer["text"], *chain(*calls))),
                    calls=calls,
                )
            )
    return found


def is_usable(text: str, controls: Sequence[str]) -> bool:
    """Return True if the contract accepts the text: a policy may answer nothing, or spell out a control token."""
    return has_visible(text) and "\0" not in text and not any(control in text for control in controls)
