"""Input and output of all steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from rlcore.tasks.presets.sections import Sections
from rlcore.tasks.store.artifacts import ArtifactRef

if TYPE_CHECKING:
    from rlcore.tasks.tracking.runs import RunTracker

R = TypeVar("R")

MODEL = "model"  # the checkpoint's folder in an artifact
RECORDS = "records.parquet"  # a benchmark's records of all documents


def prepare_stage_name(data: str) -> str:
    """Return the stage that prepares the dataset ``data``."""
    return f"prepare_{data}"


class ProgressReporter(Protocol):
    """Reporter of a loop's progress: ``done`` of ``total`` turns, with the metrics of the last."""

    def __call__(self, label: str, done: int, total: int, metrics: Mapping[str, float] | None = None) -> None: ...


class TaskRunner(Protocol):
    """Runner of one turn of a loop, as a task if the pipeline has tasks; returns the result of ``work``."""

    def __call__(self, name: str, number: int, work: Callable[[], R]) -> R: ...


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """Input of a step.

    ``stage``: its stage's name, with which keys in errors begin (``stages.grpo.…``). ``folder`` becomes the artifact.
    ``work`` survives a kill, and a resumed step finds it unchanged. ``inputs``: folders of the upstream artifacts by
    stage name, read-only. ``config``: the selected sections. ``checkpoint_key``: key that checkpoints must have, equal
    for runs of different lengths if these can continue each other. ``tracker``: the stage's MLflow run. ``log`` shows a
    line to the user.
    """

    stage: str
    folder: Path
    work: Path
    inputs: Mapping[str, Path]
    input_refs: Mapping[str, ArtifactRef]
    config: Sections
    seed: int
    stage_key: str
    checkpoint_key: str
    tracker: RunTracker
    log: Callable[[str], None]
    report_progress: ProgressReporter
    run_task: TaskRunner


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """Result of a step besides its files: summary metrics, number of rows, and contract."""

    metrics: Mapping[str, float]
    rows: int = 0
    contract: str = ""
