"""Checks of a benchmark stage before a run: the evaluation harness and the task files."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from rlcore.extras import install_command
from rlcore.tasks.kinds.benchmark.settings import BenchmarkStage


def errors(key: str, stage: BenchmarkStage) -> Iterator[str]:
    """Yield what is missing for the stage of the key ``stages.NAME``: the evaluation harness, files of its tasks."""
    if find_spec("lm_eval") is None:
        yield f"{key}: the evaluation harness is not installed: {install_command('benchmarks')}"
    folder = Path(stage.settings.folder)
    for task in stage.settings.tasks:
        if not (folder / f"{task}.yaml").is_file():
            yield f"{key}.tasks: there is no file {folder / f'{task}.yaml'}"
