"""Results of the runs: one file per task, ``benchmarks/results/evidence-TASK.json``, with every arm and seed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated

from rlcore.errors import ConfigError, DataError
from rlcore.strict_config import AtLeast, build_partly, to_dict
from rlcore.tasks.store.storage import read_json, write_bytes

RESULTS = Path(__file__).parents[1] / "results"
Count = Annotated[int, AtLeast(0)]
Seconds = Annotated[float, AtLeast(0.0)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """State after an iteration: totals so far, and means of its completions.

    Attributes:
        reward: What was trained on.
        score: The verifier's.
        kl: Nats per completion from the start.
    """

    completions: Count
    tokens: Count
    cpu_seconds: Seconds
    reward: float
    score: float
    kl: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One run of an arm.

    Attributes:
        right: A character per held-out problem, 1 if its answer is right; "" for arms without a policy.
        tokens: Sampled in training, with the samples that an offline arm trains on; ``completions`` likewise.
        cpu_seconds: Processor seconds of every stage that the arm adds to its start.
        curve: Iterations of RL; none of an offline arm.
        memory: Bytes by part, and their ``total``, at the largest update.
        figures: Other figures by name.
    """

    right: str = ""
    tokens: Count = 0
    completions: Count = 0
    cpu_seconds: Seconds = 0.0
    curve: tuple[Point, ...] = ()
    memory: Mapping[str, Count] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if set(self.right) - {"0", "1"}:
            raise ConfigError("right: must have only the characters 0 and 1")
        if any(later.completions <= point.completions for point, later in pairwise(self.curve)):
            raise ConfigError("curve: completions must rise from point to point")


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskResults:
    """Runs on one task: by arm, then by seed."""

    task: str
    model: str
    machine: str
    commit: str
    arms: Mapping[str, Mapping[str, Arm]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for seed in {seed: None for runs in self.arms.values() for seed in runs}:
            lengths = {name: len(runs[seed].right) for name, runs in self.arms.items() if seed in runs}
            if len(set(lengths.values()) - {0}) > 1:
                raise ConfigError(f"arms: seed {seed} must have the same held-out problems in all arms, has {lengths}")

    def with_arm(self, name: str, seed: int, arm: Arm) -> TaskResults:
        """Return the results with one more run, or with another one in its place."""
        return replace(self, arms={**self.arms, name: {**self.arms.get(name, {}), str(seed): arm}})


def path_of(task: str, folder: Path = RESULTS) -> Path:
    """Return the file of a task's results."""
    return folder / f"evidence-{task}.json"


def read_results(path: Path) -> TaskResults:
    """Read the results of a task.

    Raises:
        StorageError: No such file, or no JSON.
        DataError: A key or value is wrong; all are listed.
    """
    results, errors = build_partly(TaskResults, read_json(path))
    if errors or results is None:
        fix = "correct the file, or delete it and run the benchmark again: finished stages are cached"
        raise DataError("; ".join(errors), where=str(path), fix=fix)
    return results


def write_results(results: TaskResults, folder: Path = RESULTS) -> None:
    """Write the results of a task atomically, one run per line."""
    document = to_dict(results)
    arms = [
        f"{_json(name)}: {{\n" + ",\n".join(f"  {_json(seed)}: {_json(run)}" for seed, run in runs.items()) + "}"
        for name, runs in document.pop("arms").items()
    ]
    text = _json(document).removesuffix("}") + ', "arms": {\n' + ",\n".join(arms) + "}}\n"
    write_bytes(text.encode(), path_of(results.task, folder))


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
