"""Rollouts and their scores as one contract-checked Parquet file per iteration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from data_contracts import rollouts as contract
from rlcore.sampling.episodes import transcript
from rlcore.types import ScoredRollout
from tasks.storage import write_table


def write_rollouts(
    path: Path,
    iteration: int,
    groups: Sequence[Sequence[ScoredRollout]],
    *,
    replaced: Sequence[Sequence[ScoredRollout]] = (),
) -> None:
    """Check the rows against the contracts ``rollouts/v1`` and ``scores/v1``, then write them atomically.

    ``replaced``: groups that were sampled and scored, and gave way to others (dynamic sampling).
    """
    frame = rollout_frame(iteration, groups, replaced=replaced)
    contract.check_rollouts(frame)
    write_table(frame, path)


def rollout_frame(
    iteration: int, groups: Sequence[Sequence[ScoredRollout]], *, replaced: Sequence[Sequence[ScoredRollout]] = ()
) -> pd.DataFrame:
    """One row per rollout; tokens and log-probabilities as sampled, the text has every turn and tool output."""
    rows = [
        {
            "iteration": iteration,
            "prompt_id": item.rollout.prompt.prompt_id,
            "sample_index": index,
            "prompt": item.rollout.prompt.messages[-1].content,
            "reference": item.rollout.prompt.reference,
            "text": transcript(item.rollout),
            "completion_ids": list(item.rollout.completion_ids),
            "sampler_logprobs": list(item.rollout.sampler_logprobs),
            "loss_mask": list(item.rollout.loss_mask),
            "policy_version": item.rollout.policy_version,
            "finish_reason": item.rollout.finish_reason,
            "value": float("nan") if item.score.value is None else item.score.value,
            "parts": json.dumps(dict(item.score.parts), sort_keys=True),
            "error": item.score.error,
            "replaced": gave_way,
        }
        for gave_way, kept in ((False, groups), (True, replaced))
        for group in kept
        for index, item in enumerate(group)
    ]
    return pd.DataFrame(rows)
