"""Recorder of an RL stage: metrics to MLflow, messages to the log, rollouts to tables."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from rlcore.data_contracts.contracts import rollouts as contract
from rlcore.errors import StorageError
from rlcore.loop import HealthStop, summary_line
from rlcore.loop.prompt_schedule import SampledGroups
from rlcore.metrics import check_names
from rlcore.tasks.steps.base import StageContext
from rlcore.tasks.store.storage import matches_digest, note_digest, write_json, write_table
from rlcore.tasks.tracking.runs import RunTracker
from rlcore.types import ScoredRollout

SAMPLE_ROWS = 16
WRITE_SECONDS = 5.0  # seconds between two writes of a fast loop


class StageRecorder:
    """Recorder to the stage's MLflow run, rollout tables and log."""

    def __init__(self, context: StageContext, num_iterations: int) -> None:
        self._context, self._num_iterations = context, num_iterations
        self.keeper = RolloutKeeper(context.work, context.tracker)

    def log(self, text: str) -> None:
        """Show the text as a line of the stage."""
        self._context.log(text)

    def metrics(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics, and a summary line.

        Raises:
            TrainingError: a name that the glossary does not know.
        """
        check_names(metrics)
        self._context.tracker.log_metrics(metrics, step=iteration)
        self.log(summary_line(iteration, self._num_iterations, metrics))

    def rollouts(self, iteration: int, drawn: SampledGroups[list[ScoredRollout]]) -> None:
        """Collect the rollouts for the tables."""
        self.keeper.keep(iteration, drawn)

    def stopped(self, stop: HealthStop) -> None:
        """Tag the MLflow run and log the stop."""
        where = f"stopped by {stop.finding.rule} after iteration {stop.iteration}"
        self._context.tracker.set_tags({"health": where})
        self.log(str(stop))

    def flush(self) -> None:
        """Write the tables, and wait until MLflow has stored everything.

        Raises:
            ContractError: a rollout breaks its contract.
        """
        self.keeper.write()
        self._context.tracker.flush()


class RolloutKeeper:
    """Keeper of all rollouts of a run: a file for each iteration, and a sample that MLflow shows.

    Iterations are checked together every five seconds, since the cost hardly depends on the number of rows, and written
    in the background. Call :meth:`write` before the tracker is flushed for a checkpoint, and at the end.
    """

    def __init__(self, work: Path, tracker: RunTracker) -> None:
        self.folder, self._samples, self._tracker = work / "rollouts", work / "samples", tracker
        self.folder.mkdir(parents=True, exist_ok=True)
        self._waiting: list[dict[str, Any]] = []  # rows
        self._written = time.monotonic()

    def keep(self, iteration: int, drawn: SampledGroups[list[ScoredRollout]]) -> None:
        """Collect the rollouts of an iteration, including those that dynamic sampling replaced."""
        self._waiting += rollout_rows(iteration, drawn.groups, replaced=drawn.replaced)
        if time.monotonic() - self._written > WRITE_SECONDS:
            self.write()

    def write(self) -> None:
        """Check the collected rollouts and write them in the background; the tracker's next flush waits for it.

        Raises:
            ContractError: a row breaks ``rollouts/v3`` or ``scores/v1``; none of them is written.
        """
        rows, self._waiting = self._waiting, []
        self._written = time.monotonic()
        if not rows:
            return
        frame = pd.DataFrame(rows)
        contract.check_rollouts(frame)
        for iteration, part in frame.groupby("iteration"):
            name = f"iteration-{iteration:05d}"
            table, sample = self.folder / f"{name}.parquet", self._samples / f"{name}.json"
            self._tracker.in_background(partial(write_table, part, table))
            self._tracker.in_background(partial(note_digest, table))
            self._tracker.in_background(partial(write_sample, part, sample))
            self._tracker.log_table(sample, "samples")

    def require_intact(self) -> None:
        """Verify the digests of all tables, including those of earlier attempts.

        Raises:
            StorageError: a table was modified.
        """
        for table in sorted(self.folder.glob("*.parquet")):
            if not matches_digest(table):
                raise StorageError(
                    "rollout table was modified after it was written (digest mismatch)",
                    where=str(table),
                    fix=f"delete {self.folder.parent} and rerun",
                )


def write_rollouts(path: Path, iteration: int, groups: Sequence[Sequence[ScoredRollout]]) -> None:
    """Check the rows against the contracts ``rollouts/v3`` and ``scores/v1``, and write them atomically."""
    frame = pd.DataFrame(rollout_rows(iteration, groups))
    contract.check_rollouts(frame)
    write_table(frame, path)


def write_sample(frame: pd.DataFrame, path: Path) -> None:
    """Write the iteration's first 16 rollouts, in whole groups if these are small, as a table for MLflow.

    Each reward term has a column. An episode is one row; if any has branches, a column has the number of its samples.
    """
    is_episode = frame["branch"] == 0
    rows = [_shown(row) for row in frame[is_episode].head(SAMPLE_ROWS).to_dict("records")]
    if not is_episode.all():
        counts = frame.groupby(is_episode.cumsum()).size()
        rows = [row | {"samples": int(count)} for row, count in zip(rows, counts, strict=False)]
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


def rollout_rows(
    iteration: int, groups: Sequence[Sequence[ScoredRollout]], *, replaced: Sequence[Sequence[ScoredRollout]] = ()
) -> list[dict[str, Any]]:
    """Return a row per sample: tokens and logprobs as sampled, text with all turns and tool outputs."""
    return [
        {
            "iteration": iteration,
            "prompt_id": sample.prompt.prompt_id,
            "sample_index": index,
            "prompt": sample.prompt.messages[-1].content,
            "reference": sample.prompt.reference,
            "text": sample.transcript,
            "branch": branch,
            "fork": sample.fork,
            "calls": json.dumps([[call.text, call.tool, call.output, call.is_error] for call in sample.tool_calls]),
            "prompt_ids": [] if item.rollout.num_sampled is None else list(sample.prompt.token_ids),
            "completion_ids": list(sample.completion_ids),
            "sampler_logprobs": list(sample.sampler_logprobs),
            "loss_mask": list(sample.loss_mask),
            "policy_version": sample.policy_version,
            "replica": sample.replica,
            "finish_reason": sample.finish_reason,
            "value": float("nan") if item.score.value is None else item.score.value,
            "parts": json.dumps(dict(item.score.terms), sort_keys=True),
            "error": item.score.error,
            "replaced": gave_way,
        }
        for gave_way, kept in ((False, groups), (True, replaced))
        for group in kept
        for index, item in enumerate(group)
        for branch, sample in enumerate(item.rollout.samples)
    ]
