"""Rollouts and their scores: one contract-checked Parquet file per iteration, and a few rows that MLflow shows."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from data_contracts import rollouts as contract
from rlcore.algorithms.dynamic_sampling import Drawn
from rlcore.sampling.episodes import transcript
from rlcore.types import ScoredRollout
from tasks.rl_run import RlRun
from tasks.storage import write_json, write_table

SAMPLE_ROWS = 16


def keep_rollouts(run: RlRun, iteration: int, drawn: Drawn[list[ScoredRollout]]) -> None:
    """Every rollout of an iteration in a file of the run, and a sample of them in MLflow, at once."""
    name = f"iteration-{iteration:05d}"
    frame = write_rollouts(run.rollouts_folder / f"{name}.parquet", iteration, drawn.groups, replaced=drawn.replaced)
    sample = run.context.work / "samples" / f"{name}.json"
    write_sample(frame, sample)
    run.context.tracker.log_table(sample, "samples")


def write_rollouts(
    path: Path,
    iteration: int,
    groups: Sequence[Sequence[ScoredRollout]],
    *,
    replaced: Sequence[Sequence[ScoredRollout]] = (),
) -> pd.DataFrame:
    """Check the rows against the contracts ``rollouts/v1`` and ``scores/v1``, write them atomically, give them back.

    ``replaced``: groups that were sampled and scored, and gave way to others (dynamic sampling).
    """
    frame = rollout_frame(iteration, groups, replaced=replaced)
    contract.check_rollouts(frame)
    write_table(frame, path)
    return frame


def write_sample(frame: pd.DataFrame, path: Path) -> None:
    """The iteration's first 16 rollouts, whole groups where they are small enough, as a table that MLflow displays.

    Every part of the reward has a column of its own.
    """
    rows = [_shown(row) for row in frame.head(SAMPLE_ROWS).to_dict("records")]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    write_json({"columns": columns, "data": [[row.get(name) for name in columns] for row in rows]}, path)


def _shown(row: dict[Any, Any]) -> dict[str, Any]:
    parts = {f"part/{name}": value for name, value in json.loads(row["parts"]).items()}
    return {
        "iteration": row["iteration"],
        "prompt_id": row["prompt_id"],
        "prompt": row["prompt"],
        "text": row["text"],
        "reference": row["reference"],
        "reward": None if math.isnan(row["value"]) else row["value"],
        **parts,
        "tokens": len(row["completion_ids"]),
        "finish_reason": row["finish_reason"],
        "error": row["error"],
    }


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
