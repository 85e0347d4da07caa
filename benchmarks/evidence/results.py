"""Results of the runs: ``benchmarks/results/evidence-TASK-SEED.json`` has every arm of a task and seed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from rlcore.errors import ConfigError, DataError
from rlcore.strict_config import AtLeast, build_partly
from rlcore.tasks.store.storage import read_json, write_bytes

Amount = Annotated[float, AtLeast(0.0)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Iterations of RL, one value each: totals so far, and means of the iteration's completions.

    Attributes:
        reward: What was trained on.
        score: The verifier's.
        kl: From the reference policy, as the run's metric ``kl/ref``.
        clipped: Fraction of clipped tokens.
        explained: Explained variance of the critic's values; ``penalty``: coefficient of KL(old || policy).
    """

    completions: tuple[Amount, ...] = ()
    tokens: tuple[Amount, ...] = ()
    cpu_seconds: tuple[Amount, ...] = ()
    reward: tuple[float, ...] = ()
    score: tuple[float, ...] = ()
    kl: tuple[float, ...] = ()
    clipped: tuple[float, ...] = ()
    explained: tuple[float, ...] = ()
    penalty: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        lengths = {each.name: len(getattr(self, each.name)) for each in fields(self)}
        if len(set(lengths.values())) > 1:
            raise ConfigError(f"must have one value per iteration in each column, has {lengths}")
        if any(after <= before for before, after in pairwise(self.completions)):
            raise ConfigError("completions: must rise from iteration to iteration")


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One run of an arm.

    Attributes:
        right: A character per held-out problem, 1 if its answer is right; "" for arms without a policy.
        tokens: Sampled in training, with the samples that an offline arm trains on; ``completions`` likewise.
        cpu_seconds: Processor seconds of every stage that the arm adds to its start.
        curve: Of RL; empty for an offline arm.
        memory: Bytes by part, and their ``total``, each at its largest update.
        figures: Other metrics by name.
    """

    right: str = ""
    tokens: Amount = 0.0
    completions: Amount = 0.0
    cpu_seconds: Amount = 0.0
    curve: Curve = field(default_factory=Curve)
    memory: Mapping[str, Amount] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    commit: str = ""

    def __post_init__(self) -> None:
        if set(self.right) - {"0", "1"}:
            raise ConfigError("right: must have only the characters 0 and 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedResults:
    """Runs of one task and seed, all on the same held-out problems."""

    task: str
    seed: int
    machine: str
    arms: Mapping[str, Arm]

    def __post_init__(self) -> None:
        lengths = {name: len(arm.right) for name, arm in self.arms.items() if arm.right}
        if len(set(lengths.values())) > 1:
            raise ConfigError(f"arms: must have the same number of held-out problems, have {lengths}")


Arms = Mapping[str, Mapping[int, Arm]]
"""Runs of a task, by arm and seed."""


def read_results(paths: Sequence[Path]) -> list[SeedResults]:
    """Read files of results.

    Raises:
        StorageError: A file cannot be read, or is no JSON.
        DataError: A key or value is wrong; all are listed.
    """
    found = []
    for path in paths:
        document = read_json(path)
        is_table = isinstance(document, dict) and isinstance(document.get("arms"), dict)
        results, errors = build_partly(SeedResults, document) if is_table else (None, ["must have a table of arms"])
        if results and path.name != f"evidence-{results.task}-{results.seed}.json":
            errors.append(f"task = {results.task!r}, seed = {results.seed}: must be those of the file's name")
        if errors or results is None:
            fix = "correct the file, or delete it and run the benchmark again"
            raise DataError("; ".join(errors), where=str(path), fix=fix)
        found.append(results)
    return found


def write_results(document: Mapping[str, Any], path: Path) -> None:
    """Write the results of a seed, a line per arm.

    Raises:
        StorageError: Writing fails.
    """
    head = [f"{json.dumps(key)}: {json.dumps(value)}," for key, value in document.items() if key != "arms"]
    arms = [f"{json.dumps(name)}: {json.dumps(arm, allow_nan=False)}" for name, arm in document["arms"].items()]
    write_bytes("\n".join(["{", *head, '"arms": {', ",\n".join(arms), "}}", ""]).encode(), path)


def by_task(results: Sequence[SeedResults]) -> dict[str, Arms]:
    """Return the runs of each task, seeds in order."""
    tasks: dict[str, dict[str, dict[int, Arm]]] = {}
    for each in sorted(results, key=lambda one: one.seed):
        for name, arm in each.arms.items():
            tasks.setdefault(each.task, {}).setdefault(name, {})[each.seed] = arm
    return {**tasks}
