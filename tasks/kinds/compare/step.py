"""Comparison of checkpoints on the same held-out problems."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import pandas as pd

from rlcore.evaluation.paired_tests import paired_difference
from rlcore.tasks.steps.base import StageContext, StageResult
from rlcore.tasks.store.storage import read_json, read_table, write_json

_EVALUATE = "evaluate_"


def run_compare(
    context: StageContext, *, contrasts: tuple[tuple[str, str], ...], same_start_runs: tuple[tuple[str, ...], ...]
) -> StageResult:
    """Compute differences with intervals and paired tests from stored answers. No model runs.

    ``contrasts``: pairs of checkpoints, the new one first. ``same_start_runs``: RL stages with one starting checkpoint.
    """
    folders = evaluations_in(context.inputs)
    summaries = {name: read_json(folder / "summary.json") for name, folder in folders.items()}
    answers = {name: greedy_answers(folder) for name, folder in folders.items()}
    confidence = context.config.confidence
    differences = {
        f"{new} - {old}": paired_difference(
            answers[new]["correct"].tolist(), answers[old]["correct"].tolist(), confidence=confidence
        )
        for new, old in contrasts
        if len(answers[new])
    }
    documents = {name: asdict(paired) for name, paired in differences.items()}
    found = {"summaries": summaries, "differences": documents, "opponents": same_start_runs}
    write_json(found, context.folder / "comparison.json")
    metrics = {f"accuracy/{name}": row["eval/accuracy"] for name, row in summaries.items() if "eval/accuracy" in row}
    metrics |= {f"gain/{name.replace(' - ', '_over_')}": d.difference.mean for name, d in differences.items()}
    write_json(metrics, context.folder / "metrics.json")
    context.tracker.log_metrics(metrics, step=0)
    return StageResult(metrics=metrics)


def evaluations_in(folders: Mapping[str, Path]) -> dict[str, Path]:
    """Return the evaluations among the artifacts of stages, keyed by the evaluated checkpoint."""
    return {name.removeprefix(_EVALUATE): each for name, each in folders.items() if name.startswith(_EVALUATE)}


def greedy_answers(folder: Path) -> pd.DataFrame:
    """Return a checkpoint's greedy answers to the problems that are graded, in the problems' order."""
    table = read_table(folder / "answers.parquet")
    return table[(table["mode"] == "greedy") & table["is_graded"]].sort_values("prompt_id").reset_index(drop=True)
