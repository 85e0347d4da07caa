"""Preference pairs that a policy of the run samples and the verifier labels, then the data gate."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pandas as pd

from rlcore.errors import DataError
from rlcore.rewards.base import RewardFn
from rlcore.sampling.base import Sampler, SamplingParams
from rlcore.seeding import derive_seed
from rlcore.tasks.kinds.data.step import prepare
from rlcore.tasks.presets.data import POLICY, DatasetConfig
from rlcore.tasks.steps.base import MODEL, StageContext, StageResult
from rlcore.tasks.steps.rewards import verifier
from rlcore.tasks.steps.rollout_engine import open_engine
from rlcore.tasks.steps.rows import read_prompt_sets
from rlcore.tasks.steps.runtime import Workload, open_runtime
from rlcore.tasks.store.storage import write_table
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Prompt, Rollout


def run_prepare_sampled(
    context: StageContext, *, name: str, policy: str, prompts: tuple[str, ...], held_out: tuple[str, ...]
) -> StageResult:
    """Gate pairs of answers of the stage ``policy`` to the training prompts of the datasets ``prompts``."""
    path = context.work / "pairs.parquet"
    config = context.config.data[name]
    write_sampled_pairs(context, config, path, policy=policy, prompts=prompts)
    read = dataclasses.replace(config, adapter="preferences", path=str(path), eval_path="", fallback="", policy="")
    read = dataclasses.replace(read, options={})
    return prepare(context, read, tokenizer=context.inputs[policy] / MODEL, held_out=held_out)


GROUP_SIZE = 8
PROMPTS_AT_A_TIME = 64
MAX_CONCURRENT = 256
RIGHT, WRONG = 1.0, 0.0


def write_sampled_pairs(
    context: StageContext, config: DatasetConfig, path: Path, *, policy: str, prompts: Sequence[str]
) -> None:
    """Write as many pairs as the preset requests in contract columns, at most one per training prompt.

    Raises:
        DataError: all answers of the policy were right, or all were wrong.
    """
    checkpoint = context.inputs[policy] / MODEL
    tokenizer = ChatTokenizer.load(checkpoint)
    asked = read_prompt_sets(context, prompts, "train", tokenizer)
    longest = max(len(prompt.token_ids) for prompt in asked)
    params = SamplingParams(
        temperature=1.0, max_new_tokens=max(1, config.max_tokens - longest - 1), num_samples=GROUP_SIZE
    )
    prefill = tokenizer.prefill
    with ExitStack() as stack:
        runtime = stack.enter_context(open_runtime(context.config.hardware, seed=context.seed))
        grade = stack.enter_context(verifier(context, runtime, prefill=prefill))
        sampler = stack.enter_context(
            open_engine(
                checkpoint,
                tokenizer,
                config=context.config.engine,
                work=Workload(max_concurrent=MAX_CONCURRENT, max_tokens=config.max_tokens),
                runtime=runtime,
                progress=context.log,
            )
        )
        groups = sample_groups(sampler, asked, params, seed=context.seed)
        pairs = list[dict[str, object]]()
        wanted = config.num_train + config.num_eval
        for number, group in enumerate(groups, start=1):
            pair = pair_of(group, grade, prefill)
            pairs += [] if pair is None else [pair]
            if number % PROMPTS_AT_A_TIME == 0:
                context.log(f"pairs={len(pairs)}/{wanted} prompts={number}")
            if len(pairs) == wanted:
                break
    if not pairs:
        raise DataError(
            f"the policy gave no pair: on {len(asked)} prompts its answers were all right or all wrong",
            where=f"the adapter 'policy' with policy = {config.policy!r}",
            fix="train the policy longer, choose other prompts, or name a file of pairs in the dataset's path",
        )
    write_table(pd.DataFrame(pairs), path)


def sample_groups(
    sampler: Sampler, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int
) -> Iterator[list[Rollout]]:
    """Yield a group of completions per prompt, sampled lazily."""
    for start in range(0, len(prompts), PROMPTS_AT_A_TIME):
        chosen = prompts[start : start + PROMPTS_AT_A_TIME]
        for group in sampler.sample(chosen, params, seed=derive_seed(seed, "pairs", start)):
            yield [rollout for rollout in group if isinstance(rollout, Rollout)]


def pair_of(group: Sequence[Rollout], grade: RewardFn, prefill: str) -> dict[str, object] | None:
    """Pair the first right answer of a group with its first wrong one; None if it has only one kind.

    The stored answers include ``prefill``, the text that the chat template writes before a completion.
    """
    values = [score.value for score in grade(group)]
    right = next((rollout for rollout, value in zip(group, values, strict=True) if value == RIGHT), None)
    wrong = next((rollout for rollout, value in zip(group, values, strict=True) if value == WRONG), None)
    if right is None or wrong is None:
        return None
    return {
        "pair_id": right.prompt.prompt_id,
        "messages": [{"role": message.role, "content": message.content} for message in right.prompt.messages],
        "chosen": prefill + right.text,
        "rejected": prefill + wrong.text,
        "margin": 0.0,
        "weight": 1.0,
        "source": POLICY,
    }
