"""A small plan with results: a method that learns faster than another, and their start."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from benchmarks.evidence.plan import Plan, read_plan
from benchmarks.evidence.results import Arm, Arms, Curve, write_results

CLAIMS = """
tasks = ["sums"]
[sd]
learning = 0.03
[[claim]]
name = "fast"
text = "The fast method learns faster"
source = "a textbook"
figure = "curves"
arms = ["fast", "slow"]
  [[claim.contrast]]
  name = "fast against slow"
  arms = { fast = 1, slow = -1 }
  measure = "learning"
  expected = 0.05
  [[claim.contrast]]
  name = "end"
  arms = { fast = 1, slow = -1 }
  measure = "accuracy"
  margin = 0.05
  tasks = ["sums"]
  [[claim.contrast]]
  name = "start"
  arms = { fast = 1, start = -1 }
  measure = "accuracy"
  expected = 0.1
  primary = false
"""

TWO_TASKS = CLAIMS.replace('tasks = ["sums"]', 'tasks = ["sums", "words"]', 1)


def plan(folder: Path, text: str = CLAIMS) -> Plan:
    path = folder / "claims.toml"
    path.write_text(text)
    return read_plan(path)


def run(scores: list[float], *, right: str = "", seconds: float = 10.0, before: float = 0.0) -> Arm:
    """An arm with iterations of 100 completions and so many seconds, after other stages of so many seconds."""
    parts = {"weights": 4, "gradients": 4, "optimizer": 8, "activations": 3, "kv_cache": 1, "total": 20}
    iterations = range(1, len(scores) + 1)
    none = (0.0,) * len(scores)
    curve = Curve(
        completions=tuple(100 * each for each in iterations),
        tokens=tuple(1000 * each for each in iterations),
        cpu_seconds=tuple(seconds * each for each in iterations),
        reward=tuple(score + 0.1 for score in scores),
        score=tuple(scores),
        kl=tuple(0.1 * each for each in iterations),
        clipped=none,
        explained=none,
        penalty=none,
    )
    return Arm(
        right=right,
        tokens=1000 * len(scores),
        completions=100 * len(scores),
        cpu_seconds=before + seconds * len(scores),
        curve=curve,
        memory={name: size * 2.0**30 for name, size in parts.items()},
        figures={"win_rate": 0.5},
    )


def arms() -> dict[str, dict[int, Arm]]:
    """Three seeds, each a little better than the one before, and one of the start."""
    fast = {seed: run([0.2, 0.6, 0.7 + seed / 100], right="1101" * 25 + "0" * seed) for seed in range(3)}
    slow = {seed: run([0.2, 0.3, 0.5], right="1101" * 25 + "0" * seed, before=5.0) for seed in range(3)}
    return {"fast": fast, "slow": slow, "start": {0: Arm(right="0101" * 25)}}


def write(folder: Path, runs: Arms, *, task: str = "sums") -> list[Path]:
    """Write results as the benchmark does, a file per seed."""
    seeds = sorted({seed for each in runs.values() for seed in each})
    for seed in seeds:
        of_seed = {name: asdict(each[seed]) for name, each in runs.items() if seed in each}
        document = {"task": task, "seed": seed, "machine": "a CPU, one thread", "arms": of_seed}
        write_results(document, folder / f"evidence-{task}-{seed}.json")
    return sorted(folder.glob("evidence-*.json"))
