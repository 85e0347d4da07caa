"""A small plan with results: a method that learns faster than another, its start, and a reward model."""

from __future__ import annotations

from pathlib import Path

from benchmarks.evidence.plan import Plan, read_plan
from benchmarks.evidence.results import Arm, Point, TaskResults

CLAIMS = """
correction = "bonferroni over all contrasts of the file"
[sd]
sums = 0.05
words = 0.1
[[claim]]
name = "fast"
text = "The fast method learns faster."
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
  task = "sums"
"""


def plan(folder: Path, text: str = CLAIMS) -> Plan:
    path = folder / "claims.toml"
    path.write_text(text)
    return read_plan(path)


def curve(scores: list[float], *, seconds: float = 10.0) -> tuple[Point, ...]:
    """Iterations of 100 completions and so many seconds."""
    return tuple(
        Point(
            completions=100 * number,
            tokens=1000 * number,
            cpu_seconds=seconds * number,
            reward=score + 0.1,
            score=score,
            kl=0.1 * number,
        )
        for number, score in enumerate(scores, start=1)
    )


def run(scores: list[float], *, right: str = "", seconds: float = 10.0, before: float = 0.0) -> Arm:
    """An arm with a curve, after other stages of so many seconds."""
    parts = {"weights": 4, "gradients": 4, "optimizer": 8, "activations": 3, "kv_cache": 1}
    return Arm(
        right=right,
        tokens=1000 * len(scores),
        completions=100 * len(scores),
        cpu_seconds=before + seconds * len(scores),
        curve=curve(scores, seconds=seconds),
        memory={name: size * 2**20 for name, size in (parts | {"total": 20}).items()},
        figures={"sft_fraction": 0.5},
    )


def results(task: str = "sums") -> TaskResults:
    """Three seeds, each a little better than the one before."""
    found = TaskResults(task=task, model="none", machine="a CPU, 1 thread", commit="abc1234")
    for seed in range(3):
        found = found.with_arm("fast", seed, run([0.2, 0.6, 0.7 + seed / 100], right="1101" * 25 + "0" * seed))
        found = found.with_arm("slow", seed, run([0.2, 0.3, 0.5], right="1101" * 25 + "0" * seed, before=5.0))
    return found.with_arm("start", 0, Arm(right="0101" * 25, figures={"sft_fraction": 0.5}))
