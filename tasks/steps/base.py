"""Input and output of every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from rlcore.tasks.presets.sections import Sections
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.tracking.runs import RunTracker

R = TypeVar("R")

MODEL = "model"  # the checkpoint's folder inside an artifact
RECORDS = "records.parquet"  # what a checkpoint made of each document of a benchmark


def prepare_stage_name(data: str) -> str:
    """The stage that prepares the data set ``data``."""
    return f"prepare_{data}"


class ProgressReporter(Protocol):
    """Shows how far a loop is: ``done`` of ``total`` turns, with the metrics of the last."""

    def __call__(self, label: str, done: int, total: int, metrics: Mapping[str, float] | None = None) -> None: ...


class TaskRunner(Protocol):
    """Does one turn of a loop, as its own task if the pipeline has tasks, and returns what ``work`` returns."""

    def __call__(self, name: str, number: int, work: Callable[[], R]) -> R: ...


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """The input of a step.

    ``stage`` is the name of its stage, which begins the keys that its errors name (``stages.grpo.…``).
    ``folder`` becomes the artifact; ``work`` survives a kill, and a resumed step finds it as it was left; ``inputs``
    are the folders of the upstream artifacts, by the name of their stage, to be read only; ``config`` has the sections
    that the stage declared; ``tracker`` is the stage's own MLflow run; ``log`` shows a line to people.
    """

    stage: str
    folder: Path
    work: Path
    inputs: Mapping[str, Path]
    input_refs: Mapping[str, ArtifactRef]
    config: Sections
    seed: int
    stage_key: str
    tracker: RunTracker
    log: Callable[[str], None]
    report_progress: ProgressReporter
    run_task: TaskRunner


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """The result of a step besides its files: summary metrics, the number of rows, their contract."""

    metrics: Mapping[str, float]
    rows: int = 0
    contract: str = ""
