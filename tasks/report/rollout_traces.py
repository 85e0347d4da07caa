"""Choice of the rollouts that become traces: best, worst and most changed, then one from each end of the run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlcore.tasks.drawing.artifact_kinds import Folders, rl_runs
from rlcore.tasks.report.run_data import Pairs, changed_samples
from rlcore.tasks.store.storage import read_table
from rlcore.tasks.tracking.traces import Trace

_EXTREMES, _CHANGED = 2, 2  # of each choice; a trace costs 60 ms of processor time


def rollout_traces(name: str, folders: Folders, pairs: Pairs) -> list[Trace]:
    """Return the traces of the RL stage ``name``, most informative first; ``pairs`` names its starting checkpoint."""
    tables = sorted((rl_runs(folders)[name] / "rollouts").glob("*.parquet"))
    if not tables:
        return []
    last = _scored(tables[-1])
    return [
        *(_trace("best", row) for row in last[:_EXTREMES]),
        *(_trace("worst", row) for row in reversed(last[-_EXTREMES:])),
        *_changed(name, folders, pairs),
        *_phases(tables),
    ]


def _scored(path: Path) -> list[dict[str, Any]]:
    """Return the rollouts of an iteration that have a reward, in descending order."""
    table = read_table(path)
    ranked = table[table["value"].notna()].sort_values("value", ascending=False, kind="stable")
    return [{str(key): value for key, value in row.items()} for row in ranked.to_dict("records")]


def _phases(tables: list[Path]) -> Iterator[Trace]:
    """Return the median rollout, by reward, of the first and the last iteration."""
    for path in dict.fromkeys((tables[0], tables[-1])):
        if rows := _scored(path):
            yield _trace("middle", rows[len(rows) // 2])


def _trace(kind: str, row: Mapping[str, Any]) -> Trace:
    parts = {f"reward.{part}": f"{value:.4g}" for part, value in json.loads(row["parts"]).items()}
    tags = {
        "kind": kind,
        "iteration": str(row["iteration"]),
        "policy_version": str(row["policy_version"]),
        "reward": f"{row['value']:.4g}",
        "finish_reason": str(row["finish_reason"]),
        "prompt_id": str(row["prompt_id"]),
        **parts,
    }
    return Trace(
        inputs={"prompt": row["prompt"], "reference": row["reference"]}, outputs={"completion": row["text"]}, tags=tags
    )


def _changed(name: str, folders: Folders, pairs: Pairs) -> Iterator[Trace]:
    """Return the held-out answers that differ most from those of the starting checkpoint."""
    for block in changed_samples(folders, pairs):
        if (block["label"], block["kind"]) == (name, "most changed"):
            for row in block["rows"][:_CHANGED]:
                words = {True: "right", False: "wrong"}
                change = f"{words[bool(row['correct_before'])]} -> {words[bool(row['correct_after'])]}"
                yield Trace(
                    inputs={"prompt": row["prompt"]},
                    outputs={"before": row["completion_before"], "after": row["completion_after"]},
                    tags={"kind": "most changed", "held_out": change, "prompt_id": str(row["prompt_id"])},
                )
