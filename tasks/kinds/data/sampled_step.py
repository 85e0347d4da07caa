"""Preference pairs that a policy of the run samples and the verifier labels, then the data gate."""

from __future__ import annotations

import dataclasses

from rlcore.tasks.kinds.data.sampled_pairs import write_sampled_pairs
from rlcore.tasks.kinds.data.step import prepare
from rlcore.tasks.steps.base import MODEL, StageContext, StageResult


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
