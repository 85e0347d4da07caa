"""One arm of the evidence: the stages that it adds to its start, run in a process of its own, and its figures.

    python -m benchmarks.evidence.runs PRESET SEED ARM [KEY=VALUE ...]

The stages are cached, so a killed arm resumes. Seconds are those of the processor, or of wall time on a GPU.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["RLCORE_ENGINE"] = "inline"

import pandas as pd
import pyarrow.parquet as pq
import torch

from rlcore.errors import StorageError
from rlcore.flows.presets import open_preset
from rlcore.flows.run import run_targets
from rlcore.flows.stages import stages
from rlcore.sampling.native import NativeSampler
from rlcore.sampling.vllm.server import VllmSampler
from rlcore.tasks.kinds.win_rate.step import metrics_of
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.store.locks import file_lock
from rlcore.tasks.store.settings import Home, configure_environment, find_home
from rlcore.tasks.store.storage import read_json, read_table
from rlcore.types import Rollout

# Arms that are a stage under other settings.
VARIANTS = {"grpo_float32": ("grpo", "hardware.dtype=float32")}
_PARTS = ("weights", "gradients", "optimizer", "activations", "kv_cache", "total")
_SAMPLERS = (NativeSampler, VllmSampler)
_WALL = ("seconds/rollout", "seconds/score", "seconds/update", "seconds/sync")
_COSTS = ("completions", "tokens", "cpu_seconds")
_SCORES = ("reward/term/procedural", "reward/term/math")  # where another reward is trained on
_FIGURES = ("rm/", "win_rate/", "judge/")  # metrics that an arm's stage may report


def main(arguments: Sequence[str]) -> int:
    """Run an arm; the last line printed has its figures, and the artifacts that no other arm needs."""
    home = find_home()
    configure_environment(home)
    with file_lock(home.root / "arm.lock", wait=False) as is_mine:
        if not is_mine:
            raise StorageError("another process still runs an arm here", where=str(home.root), fix="wait for it")
        sys.stdout.write("\n" + json.dumps(_run(home, *arguments)) + "\n")
    return 0


def _run(home: Home, preset: str, seed: str, arm: str, *given: str) -> dict[str, Any]:
    last, *more = VARIANTS.get(arm, (arm,))
    overrides = (f"seed={seed}", *given, *more)
    config = open_preset(preset, overrides)
    graph = {stage.name: stage for stage in stages(config)}
    inputs = tuple(graph[last].inputs) if last in graph else ()  # the base has none, and nothing is added to it
    usage = home.root / f"usage-{arm}.jsonl"
    for stage in added(config, inputs, last) if last in graph else ():
        run_targets(preset, overrides, list(graph[stage].inputs))
        with _counted(usage):
            run_targets(preset, overrides, [stage])
    made = run_targets(preset, overrides, [name for name in (last, f"evaluate_{last}") if name in graph])
    folders = {name: home.root / ref.uri for name, ref in made.items()}
    paid = [home.root / "usage-reward_model.jsonl"] if "reward_model" in inputs else []
    found = figures(folders.get(last), folders.get(f"evaluate_{last}"), usage, paid)
    others = [stage for stage in graph.values() if not stage.name.startswith(("evaluate_", "compare"))]
    is_start = any(last in stage.inputs for stage in others)
    return {"figures": found, "unused": [str(folders[last])] if last in folders and not is_start else []}


def added(config: RunConfig, inputs: Sequence[str], name: str) -> tuple[str, ...]:
    """Return the stages that an arm adds to its start: those that sample its data, and its own."""

    def is_sampled(stage: str) -> bool:
        data = config.data.get(stage.removeprefix("prepare_"))
        return (stage in config.stages and config.stages[stage].kind == "rejection") or bool(data and data.policy)

    return (*filter(is_sampled, inputs), name)


@contextmanager
def _counted(path: Path) -> Iterator[None]:
    """Append the seconds and samples of a block, even if it fails."""
    lengths: list[int] = []

    def counting(sample: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **more: Any) -> Any:
            groups = sample(*given, **more)
            lengths.extend(len(each.completion_ids) for group in groups for each in group if isinstance(each, Rollout))
            return groups

        return counted

    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    began = clock()
    with ExitStack() as stack:
        for kind in _SAMPLERS:
            stack.enter_context(patch.object(kind, "sample", counting(kind.sample)))
        try:
            yield
        finally:
            row = {"cpu_seconds": clock() - began, "completions": len(lengths), "tokens": sum(lengths)}
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def figures(trained: Path | None, judged: Path | None, usage: Path, paid: Sequence[Path]) -> dict[str, Any]:
    """Return the figures of an arm's last stage (None for the base) and its evaluation.

    ``usage``: time and samples of each attempt; an RL run counts its own. ``paid``: of shared stages, such as the
    reward model.
    """
    path = trained / "history.json" if trained else None
    rows = read_json(path) if path and path.exists() else []
    history = [row for row in rows if "rollouts/count" in row]  # not the losses of a supervised stage
    curve = curve_of(history, on_gpu=torch.cuda.is_available())
    known = [each for each in (*paid, *([] if history else [usage])) if each.exists()]
    spent = [json.loads(line) for each in known for line in each.read_text(encoding="utf-8").splitlines()]
    spent += [{name: curve[name][-1] for name in _COSTS}] if history else []
    answers = pq.read_table(judged / "answers.parquet").to_pylist() if judged else []
    greedy = sorted((row for row in answers if row["mode"] == "greedy"), key=lambda row: row["prompt_id"])
    largest = {part: max((row.get(f"memory/{part}_bytes", 0.0) for row in history), default=0.0) for part in _PARTS}
    return {
        "right": "".join("1" if row["correct"] else "0" for row in greedy),
        "tokens": int(sum(row["tokens"] for row in spent)),
        "completions": int(sum(row["completions"] for row in spent)),
        "cpu_seconds": round(sum(row["cpu_seconds"] for row in spent), 1),
        "curve": curve,
        "memory": largest if history else {},
        "figures": other_figures(trained) if trained else {},
    }


def curve_of(history: Sequence[Mapping[str, float]], *, on_gpu: bool = False) -> dict[str, list[float]]:
    """Return the columns of a curve: costs until each iteration (on a GPU wall time), and the verifier's score."""

    def total(*names: str) -> list[float]:
        return [round(each, 2) for each in accumulate(sum(row[name] for name in names) for row in history)]

    scores = [next((row[name] for name in _SCORES if name in row), row["reward/mean"]) for row in history]
    return {
        "completions": total("rollouts/count"),
        "tokens": total("rollouts/tokens"),
        "cpu_seconds": total(*(_WALL if on_gpu else ("seconds/processor",))),
        "score": [round(score, 5) for score in scores],
    }


def other_figures(folder: Path) -> dict[str, float]:
    """Return the stage's other metrics: those of a reward model, or of a win rate with the audit of its judge."""
    own, win_rate, audit = (folder / name for name in ("metrics.json", "win_rate.json", "audit.parquet"))
    found = read_json(own) if own.exists() else {}
    if win_rate.exists():
        found = metrics_of(read_json(win_rate), read_table(audit) if audit.exists() else pd.DataFrame())
    return {name: value for name, value in found.items() if name.startswith(_FIGURES) and math.isfinite(value)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
