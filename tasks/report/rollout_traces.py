"""Choice of the rollouts that become traces: best, worst and most changed, then one from each end of the run.

An episode of several turns or samples is a tree: its turns, then its branches, each with the reason of the fork.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlcore.tasks.drawing.result import Folders, of_kind
from rlcore.tasks.report.run_data import Pairs, changed_samples
from rlcore.tasks.store.storage import read_table
from rlcore.tasks.tracking.traces import Step, Trace

_EXTREMES, _CHANGED = 2, 2  # of each choice; a trace costs 60 ms of processor time


def rollout_traces(name: str, folders: Folders, pairs: Pairs) -> list[Trace]:
    """Return the traces of the RL stage ``name``, most informative first; ``pairs`` names its starting checkpoint."""
    tables = sorted((of_kind("rl", folders)[name] / "rollouts").glob("*.parquet"))
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
    found: list[dict[str, Any]] = []
    for row in read_table(path).to_dict("records"):
        if row.get("branch"):
            found[-1]["branches"].append(row)
        else:
            found.append({str(key): value for key, value in row.items()} | {"branches": []})
    return sorted((row for row in found if not math.isnan(row["value"])), key=lambda row: -row["value"])


def _phases(tables: list[Path]) -> Iterator[Trace]:
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
    if row["branches"]:
        tags["samples"] = str(1 + len(row["branches"]))
    return Trace(
        inputs={"prompt": row["prompt"], "reference": row["reference"]},
        outputs={"completion": row["text"]},
        tags=tags,
        steps=(*_turns(row), *map(_branch, row["branches"])),
    )


def _branch(row: Mapping[str, Any]) -> Step:
    return Step(
        name=f"branch {row['branch']}", inputs={"fork": row["fork"]}, outputs={"text": row["text"]}, steps=_turns(row)
    )


def _turns(row: Mapping[str, Any]) -> tuple[Step, ...]:
    calls, read, text, found = json.loads(row.get("calls", "[]")), dict[str, str](), str(row["text"]), list[Step]()
    for number, (turn, tool, output, _) in enumerate(calls, start=1):
        found.append(Step(name=f"turn {number}", inputs=read, outputs={"text": turn, "tool": tool}))
        read = {"output": output}
        text = text.removeprefix(f"{turn}\n[{tool or 'no tool'}] {output}\n")
    last = Step(name=f"turn {len(calls) + 1}", inputs=read, outputs={"text": text})
    return (*found, last) if found else ()


def _changed(name: str, folders: Folders, pairs: Pairs) -> Iterator[Trace]:
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
